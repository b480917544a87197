"""Names that gate, up and down go by, and how they are stored under them: what entries of the family table share.

Also which names tell by themselves what they mean, and which mean one thing here and another there.
"""

from __future__ import annotations

from dataclasses import replace

from .family import FUSED_GATE_UP, SEPARATE, Projections

FUSED_EXPERTS_EITHER = replace(FUSED_GATE_UP, stored="either")
FUSED_COLUMNS = replace(FUSED_GATE_UP, stored="columns")
MIXTRAL = Projections("w1", "w3", "w2")
LINEAR_PAIR = Projections("input_linear", "input_linear", "output_linear", fused="gate-first")

GGUF_SEPARATE = Projections("ffn_gate", "ffn_up", "ffn_down")
# llama.cpp stacks the experts of a layer; where it keeps gate and up in one tensor, the gate comes first.
GGUF_EXPERTS: tuple[Projections, ...] = (
    Projections("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", group="routed"),
    Projections("ffn_gate_up_exps", "ffn_gate_up_exps", "ffn_down_exps", fused="gate-first", group="routed"),
    Projections("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", group="shared"),
)

# Names that mean the same wherever all three stand together. Experts are stacked one way or the other under them.
UNAMBIGUOUS: tuple[Projections, ...] = (
    replace(SEPARATE, stored="either"),
    Projections("wi_0", "wi_1", "wo", stored="either"),
)

# Pairs of names that some family uses for a fused gate and up (with either half first) and others for a plain MLP.
# Twice as many rows as the down projection has columns tells a fused one; which half is the gate only a family does.
FUSED_NAMES: tuple[tuple[str, str], ...] = (
    ("gate_up_proj", "down_proj"),
    ("up_gate_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("Wi", "Wo"),
    ("w12", "w3"),
    ("weights_in", "weights_out"),
    ("fc1", "fc2"),
    ("ff_proj", "ff_out"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("linear_in", "linear_out"),
    ("w13", "w2"),
    ("ffn_up", "ffn_down"),
)
# Separate names whose roles differ from family to family.
REVERSIBLE_NAMES: tuple[tuple[str, str, str], ...] = (
    ("w1", "w3", "w2"),
    ("w1", "v1", "w2"),
    ("w1", "w2", "c_proj"),
    ("fc11", "fc12", "fc2"),
    ("fc1", "fc3", "fc2"),
    ("c_fc_0", "c_fc_1", "c_proj"),
    ("c_fc", "c_fc2", "c_proj"),
    ("proj_up_gate", "proj_up", "proj_down"),
    ("linear_gate", "up_proj", "down_proj"),
)
