"""FedAvg, and ideas that can be put on any method, one file each. Files that begin with _ hold shared code."""
