"""Every error a user can meet, each with what failed, where, and what to do instead.

All of them are `GluProbeError`, so one `except` catches them. `exit_code` is what the command line
returns: 2 for input that is wrong or broken, 3 for a model that is sound but not supported.
"""

from __future__ import annotations


class GluProbeError(Exception):
    """Base of all errors of this package.

    Args:
        what: what was found, in one sentence without a full stop.
        where: the file, tensor or layer it was found in.
        hint: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, None if where is None else str(where), hint
        super().__init__(self._text())

    def _text(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.hint}" if self.hint else text

    def within(self, where: str) -> GluProbeError:
        """This error, which also says in what larger thing it was met, unless it does so already."""
        if where not in self._text():
            self.where = f"{where}: {self.where}" if self.where else where
            self.args = (self._text(),)
        return self


class UnsupportedModel(GluProbeError):
    """The checkpoint is sound, but glu-probe cannot measure it."""

    exit_code = 3


# -- what the user typed ------------------------------------------------------------------------


class BadOption(GluProbeError):
    """An option or argument has a value that means nothing here."""


class PathNotFound(GluProbeError):
    """A reference that can only be a path does not exist."""


class Unreadable(GluProbeError):
    """A file or directory exists but the system does not let it be read."""


class RepoNotFound(GluProbeError):
    """The hub has no such repository, or it is private and the token does not open it."""


class GatedRepo(GluProbeError):
    """The repository asks for its terms to be accepted first."""


class RevisionNotFound(GluProbeError):
    """The repository exists but has no such branch, tag or commit."""


class NotCached(GluProbeError):
    """The hub cannot be asked (offline) and the file is not in the local cache."""


class ServerUnavailable(GluProbeError):
    """A server was asked and did not give a usable answer."""


class HubUnavailable(ServerUnavailable):
    """The hub was asked and did not give a usable answer."""


class NeedsDownload(GluProbeError):
    """A remote file cannot be read in parts, and downloading it was not asked for."""


class FileChanged(GluProbeError):
    """A remote file is no longer the one that was opened."""


class SampleUnavailable(GluProbeError):
    """A sample model could not be fetched or is not what it should be."""


# -- files --------------------------------------------------------------------------------------


class NoWeights(GluProbeError):
    """A directory or repository holds no weight file that can be read."""


class AmbiguousFiles(GluProbeError):
    """Several weight files could be the model and nothing says which."""


class BadConfig(GluProbeError):
    """config.json or a shard index is not what it should be."""


class LFSPointer(GluProbeError):
    """A file is a Git LFS pointer: the download stopped before the weights."""


class WrongFormat(GluProbeError):
    """A file is not of the format its name promises."""


class NotSafetensors(WrongFormat):
    """A `.safetensors` file is something else."""


class NotGGUF(WrongFormat):
    """A `.gguf` file is something else."""


class NotTorchFile(WrongFormat):
    """A `.bin`, `.pt` or `.pth` file is not a PyTorch checkpoint."""


class CorruptHeader(GluProbeError):
    """The header of a weight file contradicts itself."""


class Truncated(GluProbeError):
    """A weight file ends before the data its header promises."""


class TrailingBytes(GluProbeError):
    """A weight file is longer than its header says."""


class UnsafeShardName(GluProbeError):
    """A shard index points outside its own directory."""


class MissingShard(GluProbeError):
    """A shard that the index names is absent."""


class IndexMismatch(GluProbeError):
    """The shard index and the shards disagree about a tensor."""


class UnsafePickle(GluProbeError):
    """A pickle would run code when loaded; it was not run."""


# -- tensors ------------------------------------------------------------------------------------


class IncompleteTriple(GluProbeError):
    """A gated MLP lacks its gate, up, down or norm tensor."""


class ShapeMismatch(GluProbeError):
    """Tensors of one MLP do not fit each other or the config."""


class NonFinite(GluProbeError):
    """Weights hold NaN or infinity and `strict` was asked for."""


class UnmergedAdapter(GluProbeError):
    """The file holds low-rank updates that are not merged into the weights."""


class UnscaledFP8(GluProbeError):
    """8-bit floating point weights without the scale that gives them meaning."""


# -- models that are not supported --------------------------------------------------------------


class NoGatedMLP(UnsupportedModel):
    """No gated MLP was found in the checkpoint."""


class NoExpertsMapped(UnsupportedModel):
    """The config declares experts but none of their tensors could be mapped."""


class LayoutUnknown(UnsupportedModel):
    """Which half or tensor is the gate depends on the family, and the family is unknown."""


class LayoutAmbiguous(LayoutUnknown):
    """Two readings of a tensor fit its shape, and nothing says which is meant."""


class UnknownActivation(UnsupportedModel):
    """The activation named by the config is not one whose formula is known here."""


class QuantizedWeights(UnsupportedModel):
    """Weights are packed by a scheme that is not decoded here."""


class MissingLibrary(UnsupportedModel):
    """An optional library that this needs is not installed; the message has the pip line."""


# -- results ------------------------------------------------------------------------------------


class CannotWrite(GluProbeError):
    """Results cannot be written where they were to go; what stood there is as it was."""


class AlreadyRunning(GluProbeError):
    """Another run writes into the same directory."""


class NoReport(GluProbeError):
    """A directory holds no saved report, or an incomplete one."""


# -- work that is done elsewhere --------------------------------------------------------------


class ChangedFiles(GluProbeError):
    """The files of a checkpoint changed during a run, or a worker finds others, or reads them otherwise."""


class WorkersLost(GluProbeError):
    """Workers died again and again, or cannot be reached."""


# -- texts, and models that run them --------------------------------------------------------------


class NotRunnable(UnsupportedModel):
    """The model cannot be run, or its MLPs cannot be listened to."""


class FactorsDisagree(UnsupportedModel):
    """What the factors compute is not what the model computes."""


class ModelTooLarge(GluProbeError):
    """The model does not fit into memory."""


class TextUnreadable(GluProbeError):
    """What was given as text is not text, or cannot be read."""


class TextTooShort(GluProbeError):
    """There is no text, or too few tokens of it."""


class NoTokenizer(GluProbeError):
    """The model comes without a tokenizer, or with one that cannot be loaded."""
