"""A minimal Flower app: FedAvg by Flower's strategy, two steps at each site."""
