"""What can go wrong with a load. The root, and the errors of bytes, are in `storage.errors`.

LongshoreError
+- ConfigError                  a setting or argument that cannot be meant
+- PlanError                    the request and the model do not go together
|  +- LayoutError               a tensor cannot be cut as asked; lists every such tensor
|  |  +- UnknownFamily          nor is the model's family one whose rules we have; names it
|  +- ModelConfigError          config.json is broken or contradicts what cutting needs of it
|  +- DoesNotFit                a device or host lacks the memory; says need and have for each
|     +- DoesNotFitNow          only because other processes have memory of the GPUs in use
+- ClusterError
|  +- ClusterLost               no coordinator, or Ray itself cannot be reached
|  |  +- NoCoordinator          Ray answers, and nothing was loaded yet, or Longshore was shut down
|  |  +- LoadForgotten          coordinators were killed, again and again, before the load had begun
|  +- AgentEnded                a node's agent was shut down; the next load on the node starts another
|  +- NotEnoughResources        more ranks than GPUs (or CPU ranks) free; says who holds them
|  +- VersionMismatch           client, coordinator, agents and workers run different Longshore versions
|  +- PackageMissing            a node does not have longshore installed
|  +- DeviceUnavailable         the worker cannot use the device Ray gave it
+- LoadError
|  +- ChunkFailed               a chunk could not be had from any worker within its budget
|  +- RankLost                  a worker died or stopped answering more often than allowed
|  |  +- RankTaken              a worker that was given up spoke after another one had its rank
|  +- NodeLost                  a node died, and its ranks found no other place; names both
|  +- LoadTimeout               timeout_s passed
|  +- LoadCancelled             released or cancelled before it was ready
|  +- IllegalTransition         a load was told what cannot happen in its state: a bug of ours
+- ModelNotFound                no such model in this cluster
+- ModuleMismatch               a rank's tensors and a torch module do not go together; lists every name
+- RemoteCallFailed             a function sent by LoadedModel.call raised, or its result cannot be sent back
+- CallTimeout                  ranks have not answered LoadedModel.call within its timeout_s; names them
"""

from __future__ import annotations

from storage.errors import LongshoreError


class ConfigError(LongshoreError):
    """A setting or argument that cannot be meant."""


class PlanError(LongshoreError):
    """The request and the model do not go together."""


class LayoutError(PlanError):
    """A tensor cannot be cut as asked; the message lists every such tensor."""


class UnknownFamily(LayoutError):
    """Rules are missing, and config.json names a family that we have none for: `details` say which."""


class ModelConfigError(PlanError):
    """The model's config.json is broken; the message lists every problem."""


class DoesNotFit(PlanError):
    """A device or a host lacks the memory; the message says need and have for each."""


class DoesNotFitNow(DoesNotFit):
    """Only because other processes have memory of the GPUs in use."""


class ClusterError(LongshoreError):
    """The cluster cannot do it, whatever the model is."""


class ClusterLost(ClusterError):
    """No coordinator answers, or Ray itself cannot be reached."""


class NoCoordinator(ClusterLost):
    """The Ray cluster is there, without a coordinator: nothing was loaded yet, or Longshore was shut down."""


class AgentEnded(ClusterError):
    """A node's agent was shut down, because the node was idle or taken for dead; the next load there starts another."""


class LoadForgotten(ClusterLost):
    """The coordinator was killed before agents kept the load for it; so were those that were asked anew."""


class NotEnoughResources(ClusterError):
    """More ranks than GPUs or CPU places that are free."""


class VersionMismatch(ClusterError):
    """Processes that belong together run different versions of Longshore: the message names both."""


class PackageMissing(ClusterError):
    """A node of the cluster does not have longshore installed."""


class DeviceUnavailable(ClusterError):
    """The worker cannot use the device that Ray gave it."""


class LoadError(LongshoreError):
    """A load began and could not end well."""


class ChunkFailed(LoadError):
    """A chunk could not be had from any worker within its budget."""


class RankLost(LoadError):
    """A worker died or stopped answering."""


class RankTaken(RankLost):
    """Another process has the rank by now: this one was given up, and has not been told before."""


class NodeLost(LoadError):
    """A node died, and its ranks found no other place."""


class LoadTimeout(LoadError):
    """The load did not end within timeout_s."""


class LoadCancelled(LoadError):
    """The load was released or cancelled before it was ready."""


class IllegalTransition(LoadError):
    """A load was told of an event that cannot come in its state; a bug, not a failure of the load."""


class ModelNotFound(LongshoreError):
    """No such model in this cluster."""


class ModuleMismatch(LongshoreError):
    """A torch module cannot be filled with a rank's tensors; the message lists every name, the module is as it was."""


class RemoteCallFailed(LongshoreError):
    """A function that LoadedModel.call sent to a rank raised there, or its result cannot be sent back."""


class CallTimeout(LongshoreError):
    """Ranks have not answered LoadedModel.call within its timeout_s; `details["ranks"]` names them."""
