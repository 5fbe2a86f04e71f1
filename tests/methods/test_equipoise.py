"""The recipe `equipoise`: the closed form with numbers that validation images chose."""

from harness import assert_same_bits, events, run_tiny, server_state

RECIPE = (
    "closed.prior=0",
    "closed.shrinkage=0.5",
    "closed.dimensions=512",
    "closed.per_dimension=0",
    "closed.others=0.1",
)


def test_it_is_the_closed_form_with_its_numbers(tmp_path):
    ours, closed = run_tiny(tmp_path / "ours", "equipoise"), run_tiny(tmp_path / "closed", "closed", *RECIPE)
    assert_same_bits(server_state(ours), server_state(closed))
    finals = [
        [(f["view"], f["scope"], f["site"], f["confusion"]) for f in events(run, "final")] for run in (ours, closed)
    ]
    assert finals[0] and finals[0] == finals[1]


def test_it_says_that_sums_of_few_images_may_show_one(tmp_path):
    warnings = " ".join(events(run_tiny(tmp_path, "equipoise"), "start")[0]["warnings"])
    assert "Such sums may show single images" in warnings
