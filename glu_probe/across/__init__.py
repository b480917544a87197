"""Models against each other: base and tuned, revisions of one run, sizes, quantisations. See `comparing.compare`."""
