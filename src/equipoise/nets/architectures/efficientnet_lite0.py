"""EfficientNet-Lite0: 1280 features, with ImageNet weights of images of 224 pixels."""

from equipoise.nets.architectures._efficientnet_lite import lite

NET = lite(0, size=224)
