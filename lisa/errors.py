"""One exception family for everything a user can be told.

Every message is one line that says what happened and what to do about it. Anything that is not a LisaError is a bug
and stays a traceback.
"""


class LisaError(Exception):
    """Base of all user-facing errors. `exit_code` is what the command line leaves with."""

    exit_code = 1


class UsageError(LisaError):
    """The request itself cannot be honoured (a bad option, an impossible combination)."""

    exit_code = 2


class UnknownModel(LisaError):
    """The name is neither a catalogue entry, nor a folder, nor a repository on the Hub."""


class NotCached(LisaError):
    """The model would have to be downloaded, and this run is offline."""


class HubError(LisaError):
    """The Hub refused or could not be reached: gated, missing, rate-limited, no network."""


class DamagedModel(LisaError):
    """A file of the model is missing, cut short, or not what it should be."""


class UnsupportedModel(LisaError):
    """The model is sound but of a kind Lisa does not run."""


class DoesNotFit(LisaError):
    """The model, its drafter and its context take more memory than this machine gives."""


class NoTemplate(LisaError):
    """The model has no chat template, so messages cannot be turned into tokens."""


class BadDrafter(LisaError):
    """A drafter that cannot run, or does not fit the target."""


class ContextFull(UsageError):
    """The prompt alone fills the context."""


class NoBackend(LisaError):
    """MLX is missing, or cannot run on this machine."""


class Busy(LisaError):
    """As many requests wait as may wait."""


class MemoryFull(LisaError):
    """The request's context does not fit into memory beside what is resident."""


class TooSlow(LisaError):
    """A reader left so much of its reply unread that the reply was given up."""


class Closed(LisaError):
    """The model was closed while this was waiting."""


class Cancelled(Exception):
    """Thrown into a running generation to end it; not an error, and never seen by a caller."""
