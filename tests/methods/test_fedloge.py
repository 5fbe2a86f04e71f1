"""FedLoGe: the fixed classifier trains the body alone, and heads are realigned by the lengths of their rows."""

from __future__ import annotations

import torch

from clients import new_client, noise_batch
from equipoise.methods.fedloge import sparse_simplex


def test_the_fixed_classifier_is_sparse_of_one_length_and_its_rows_are_drawn_apart():
    torch.manual_seed(1)
    start = sparse_simplex(6, 40, 0.6, 0.1, 0)
    torch.manual_seed(1)
    frame = sparse_simplex(6, 40, 0.6, 0.1, 300)
    assert (frame == 0).sum() == int(0.6 * 240) and ((frame == 0) == (start == 0)).all()
    torch.testing.assert_close(frame.norm(dim=1), torch.full((6,), 0.1))
    worst = [((f / 0.1) @ (f / 0.1).T - 2 * torch.eye(6)).amax() for f in (start, frame)]
    assert worst[1] < worst[0] - 0.05


def test_the_body_learns_from_the_fixed_classifier_alone_and_heads_from_their_own_loss():
    client = new_client("fedloge", "fedloge.steps=0")
    batch = noise_batch()
    out = client.forward(batch)
    body = list(client.net.body.parameters())
    (whole,) = torch.autograd.grad(client.loss(batch, out), [body[0]], retain_graph=True)
    fixed = torch.nn.functional.cross_entropy(out.fixed_logits, batch.label)
    (alone,) = torch.autograd.grad(fixed, [body[0]])
    torch.testing.assert_close(whole, alone)


def test_common_rows_predict_with_equal_lengths_and_own_rows_with_those_of_the_own_head():
    client = new_client("fedloge", "fedloge.steps=0")
    batch = noise_batch()
    with torch.no_grad():
        client.net.head.weight.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None])
        client.personal_head.weight.mul_(torch.tensor([4.0, 3.0, 2.0, 1.0])[:, None])
        features = client.net.eval().features(batch.image)
        head, own = client.net.head, client.personal_head
        rows = head.weight / head.weight.norm(dim=1, keepdim=True) * head.weight.norm(dim=1).mean()
        torch.testing.assert_close(client.predict("global", batch), features @ rows.T + head.bias, rtol=1e-4, atol=1e-5)
        rows = head.weight * own.weight.norm(dim=1, keepdim=True)
        torch.testing.assert_close(
            client.predict("personal", batch), features @ rows.T + head.bias, rtol=1e-4, atol=1e-5
        )
