"""From files to factors: references, tensor sources, and the table that says which tensor is what."""
