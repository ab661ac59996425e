"""Messages about checkpoints: who writes them, what became of one, and from which the run goes on."""

from __future__ import annotations

from farandole.membership.values import Count, Message, Seconds, Text


class Saved(Message):
    """Answer to End(save=True): the checkpoint's path, or why there is none.

    `between`: the script failed between two steps here, so this worker's state is of neither. `finite`: see `Manifest`;
    `seconds` is how long the writing took.
    """

    path: Text = ""
    error: Text = ""
    between: bool = False
    finite: bool = True
    seconds: Seconds = 0.0


class Checkpointed(Message):
    """A checkpoint of the beginning of `step` was written to `path`, or was not, because of `error`.

    `seconds` is how long the writing took, `copy_ms` how long the training thread was blocked; `finite`: see Manifest.
    `late`: it was left out, since the one before is still being written.
    """

    step: Count
    path: Text = ""
    error: Text = ""
    bytes: Count = 0
    seconds: Seconds = 0.0
    copy_ms: Seconds = 0.0
    finite: bool = True
    late: bool = False


class Short(Message):
    """The first view can't begin with what this worker finds: it is not the checkpoint that `Propose` spoke of."""

    view: Count
    reason: Text


class Restored(Message):
    """The first view begins at `step` with the state of `path`; "" for the script's own beginning.

    `damaged` are newer ones that were passed over, `differences` what may change the bits, in words; `last_finite`,
    where the state is not `finite`, the newest that is. `done`: the script asks for nothing more, so no view begins.
    """

    step: Count
    path: Text = ""
    damaged: tuple[Text, ...] = ()
    differences: tuple[Text, ...] = ()
    finite: bool = True
    last_finite: Text = ""
    done: bool = False


class End(Message):
    """The run ends: save the state of the last whole step if `save`, answer Saved, await Goodbye.

    `between`: nobody has that; save what the script has left between two steps.
    """

    save: bool
    reason: str
    between: bool = False


class Saver(Message):
    """`worker` writes the checkpoints from now on; `at_once`, since another could not. See `saving`."""

    worker: str
    at_once: bool = False
