"""Running a model on text: what its gated MLPs do on real input."""
