"""EfficientNet-Lite1: 1280 features, with ImageNet weights of images of 240 pixels."""

from equipoise.nets.architectures._efficientnet_lite import lite

NET = lite(1, size=240)
