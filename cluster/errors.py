"""The errors of a load. The base class, and the errors of stores and files, are in `storage.errors`.

LongshoreError
+- ConfigError                  a setting or argument is invalid
+- ConvertError                 a checkpoint of another format cannot be converted; lists every problem
|  +- BrokenCheckpointFile      a file of it is damaged, or not what its format has there
|  +- UnsafePickle              a pickle of it names code that no checkpoint needs; nothing was run
+- PlanError                    the request does not suit the model
|  +- LayoutError               a tensor cannot be cut as asked; lists every such tensor
|  |  +- UnknownFamily          and there are no rules for the model's family; names it
|  +- ModelConfigError          config.json is broken or lacks fields that layouts need
|  +- UpdateRefused             the model cannot be updated in place to that revision; nothing was touched
|  +- ScaleRefused              the model cannot have that many replicas; nothing was touched
|  +- DoesNotFit                a device or host lacks the memory; says need and have for each
|     +- DoesNotFitNow          only because other processes use memory of the GPUs
+- ClusterError
|  +- ClusterLost               no coordinator, or Ray itself cannot be reached
|  |  +- NoCoordinator          Ray answers, and nothing was loaded yet, or Longshore was shut down
|  |  +- LoadForgotten          coordinators were killed repeatedly before the load had begun
|  +- AgentEnded                a node's agent was shut down; the next load on the node starts another
|  +- NotEnoughResources        fewer GPUs (or CPU places) free than ranks; says who holds them
|  +- VersionMismatch           client, coordinator, agents and workers run different Longshore versions
|  +- PackageMissing            a node does not have longshore installed
|  +- DeviceUnavailable         the worker cannot use the device Ray gave it
+- LoadError
|  +- ChunkFailed               no worker could fetch a chunk within its retry budget
|  +- RankLost                  a worker died or stopped answering more often than allowed
|  |  +- RankRemoved            the rank went with its replica (`scale`) while something ran there
|  |  +- RankTaken              a worker counted as lost sent a message after its replacement
|  +- NodeLost                  a node died, and its ranks found no other place; names both
|  +- UpdateFailed              an update ended before its exchange; every rank has the old revision
|  +- ScaleFailed               further replicas could not be filled; the model is as it was
|  +- ModelBroken               a streaming update failed; ranks have contents of two revisions
|  +- LoadTimeout               timeout_s passed
|  +- LoadCancelled             released or cancelled before it was ready
|  +- IllegalTransition         a load received an event that is impossible in its state: a bug
+- SaveError                    a save began and failed, or could not begin; names the rank that ended it
|  +- SaveRefused               arguments or tensors cannot be saved; lists every problem, nothing was written
|  |  +- NoRoomToStage          a save in the background needs more host memory for its copy than is free
|  +- SaveConflict              another save wrote to the same URI meanwhile; nothing of this one is visible
+- ModelNotFound                no such model in this cluster
+- ModuleMismatch               a rank's tensors do not match a torch module; lists every name
+- RemoteCallFailed             a function sent by LoadedModel.call raised, or its result cannot be sent back
+- CallTimeout                  ranks have not answered LoadedModel.call within its timeout_s; names them
+- TensorNotFound               the model has no tensor of that name
+- ReaderClosed                 a model that safe_open opened was read after it was closed, or in a forked process
"""

from __future__ import annotations

import traceback

from storage.errors import LongshoreError


class ConfigError(LongshoreError):
    """A setting or argument is invalid."""


class ConvertError(LongshoreError):
    """A checkpoint of another format cannot be converted; the message lists every problem."""


class BrokenCheckpointFile(ConvertError):
    """A file of the checkpoint is damaged, or not what its format has there."""


class UnsafePickle(ConvertError):
    """A pickle of the checkpoint names code that no checkpoint of its format needs. Nothing of it was run."""


class PlanError(LongshoreError):
    """The request does not suit the model."""


class LayoutError(PlanError):
    """A tensor cannot be cut as asked; the message lists every such tensor."""


class UnknownFamily(LayoutError):
    """Rules are missing, and there are none for the family that config.json names; `details` has the family."""


class ModelConfigError(PlanError):
    """The model's config.json is broken; the message lists every problem."""


class DoesNotFit(PlanError):
    """A device or a host lacks the memory; the message says need and have for each."""


class DoesNotFitNow(DoesNotFit):
    """The load does not fit only because other processes use memory of the GPUs."""


class UpdateRefused(PlanError):
    """The resident model cannot be updated in place to that revision; the message says why. Nothing was touched."""


class ScaleRefused(PlanError):
    """The resident model cannot have that many replicas; the message says why. Nothing was touched."""


class ClusterError(LongshoreError):
    """The cluster cannot do it, for any model."""


class ClusterLost(ClusterError):
    """No coordinator answers, or Ray itself cannot be reached."""


class NoCoordinator(ClusterLost):
    """The Ray cluster has no coordinator: nothing was loaded yet, or Longshore was shut down."""


class AgentEnded(ClusterError):
    """A node's agent was shut down, as the node was idle or counted as dead. The next load there starts another."""


class LoadForgotten(ClusterLost):
    """Coordinators were killed repeatedly before any agent had a record of the load."""


class NotEnoughResources(ClusterError):
    """There are fewer free GPUs or CPU places than ranks."""


class VersionMismatch(ClusterError):
    """Processes of one cluster run different versions of Longshore; the message names both."""


class PackageMissing(ClusterError):
    """A node of the cluster does not have longshore installed."""


class DeviceUnavailable(ClusterError):
    """The worker cannot use the device that Ray gave it."""


class LoadError(LongshoreError):
    """A load began and failed."""


class ChunkFailed(LoadError):
    """No worker could fetch a chunk within its retry budget."""


class RankLost(LoadError):
    """A worker died or stopped answering."""


class RankRemoved(RankLost):
    """The rank went with its replica, when the model got fewer of them, while something ran there."""


class RankTaken(RankLost):
    """Another process has this rank now. This process counted as lost and learns it from this error."""


class NodeLost(LoadError):
    """A node died, and its ranks found no other place."""


class UpdateFailed(LoadError):
    """An update ended before its exchange. Every rank has the revision that it had."""


class ScaleFailed(LoadError):
    """Further replicas of a resident model could not be filled. The model is as it was."""


class ModelBroken(LoadError):
    """A streaming update failed, and ranks have contents of two revisions. Update the model again, or release it."""


class LoadTimeout(LoadError):
    """The load did not end within timeout_s."""


class LoadCancelled(LoadError):
    """The load was released or cancelled before it was ready."""


class IllegalTransition(LoadError):
    """A load received an event that is impossible in its state. This is a bug in Longshore."""


class SaveError(LongshoreError):
    """A save ended; `details["rank"]` names who ended it.

    The previous revision is as it was, unless the hint says that the new one is or may be visible.
    """


class SaveRefused(SaveError):
    """Arguments or tensors cannot be saved. The message lists every problem, and nothing was written."""


class NoRoomToStage(SaveRefused):
    """Host memory has no room for the copy that a save in the background makes; `details` has the bytes missing."""


class SaveConflict(SaveError):
    """Another save or publish wrote to the same URI meanwhile. Nothing of this save is visible."""


class ModelNotFound(LongshoreError):
    """The cluster has no such model."""


class ModuleMismatch(LongshoreError):
    """A torch module cannot be filled with a rank's tensors; the message lists every name, the module is as it was."""


class RemoteCallFailed(LongshoreError):
    """A function that LoadedModel.call sent to a rank raised there, or its result cannot be sent back."""


class TensorNotFound(LongshoreError):
    """The model has no tensor of that name."""


class ReaderClosed(LongshoreError):
    """A model that `safe_open` opened was read after it was closed, or in a process that was forked afterwards."""


class CallTimeout(LongshoreError):
    """Ranks have not answered LoadedModel.call within its timeout_s; `details["ranks"]` names them."""


def empty_frames(error: BaseException) -> None:
    """Clear the local variables of the frames of an error and what caused it, so that it keeps no chunk and no tensor.

    Frames of running functions stay as they are.
    """
    emptied: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in emptied:
        traceback.clear_frames(one.__traceback__)
        emptied.add(id(one))
        one = one.__cause__ or one.__context__
