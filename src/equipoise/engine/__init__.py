"""One federation on one machine: rounds, the places where sites run, evaluation, selection, checkpoints, and models
that leave a run (prediction, export)."""
