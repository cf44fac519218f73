"""Why a model cannot run as a stacked forward pass, as an exception and as texts."""


class NotStackable(Exception):  # noqa: N818 (a finding, not a fault)
    """The module does something that a stacked forward pass cannot express; use `vmap`."""


PATH_CHANGED = (
    "The model's forward pass took another path in training than in the check before training: "
    "use engine 'loop'."
)
CONTROL_FLOW = "has data-dependent control flow"
MIXES_EXAMPLES = "its forward pass has cross-example dependence"
CALLS_CHANGE = f"{MIXES_EXAMPLES}: which functions it calls depends on the batch size"
LOOKUP = (
    "an embedding lookup without a batch dimension, such as positions; "
    "torch.arange(T).expand(len(x), T) has one"
)
