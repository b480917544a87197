"""Pages that open from disk: frames and pictures in, one self-contained HTML file out."""
