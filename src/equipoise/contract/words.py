"""The words of components and methods: seats with one holder each, and what methods grant and components need."""

from collections.abc import Mapping

#: what one component, or the method itself, decides alone
SEATS: Mapping[str, str] = {
    "head": "the net's last layers",
    "loss": "the supervised loss",
    "carrier": "the net that travels",
    "merge": "how the server merges models",
    "draws": "which images an epoch draws",
    "predict": "how a model predicts",
}

#: what a method grants unless it says otherwise, or a component takes it away
WORDS: Mapping[str, str] = {
    "model": "a model on the server",
    "whole model": "that the whole net travels",
    "class head": "a linear head that travels, with one row for each class",
    "head predicts": "that the head which the server sends predicts",
    "one model": "that all sites receive the same model",
    "plain forward": "one net that trains, whose features give its logits",
    "plain features": "features of the net that trains among the outputs of its forward pass",
    "plain loss": "that the supervised loss of the net's logits is the whole loss of the method",
    "net trains": "that the net which the site receives is the one that trains",
    "fixed personal models": "that a site's model is not tuned before each evaluation",
    "one loss": "one loss for each step of training",
    "one training ask": "that the server asks a site once in a round to train",
    "local epochs": "training by whole epochs",
    "supervised": "a supervised loss of logits",
    "image labels": "one label for each image",
    "pooled features": "one vector of features for each image",
    "masks": "a mask for each image",
    "sites": "several sites, each with its images",
    "absent classes": "that the loss trains the weights of classes which a site lacks",
    "norm layers": "norm layers in the net",
    "batch norm": "batch-norm layers in the net",
    "all classes": "a loss in which classes that a site lacks compete",
}
GRANTED = frozenset(WORDS)
