"""Evidence: scores made anew from kept predictions, with intervals, by sub-groups, as curves, and paired by method."""
