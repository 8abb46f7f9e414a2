"""Longshore's Python client: `import cluster; cluster.load("s3://models/llama", tensor_parallel_size=4)`.

Names are loaded when they are first used (PEP 562), so importing this needs neither Ray nor torch; planning,
manifests and the executor work where those are not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from longshore.installation import check_packages

if TYPE_CHECKING:
    from actors.hosting import host_rank as host_rank
    from actors.reader.open_model import OpenModel as OpenModel
    from actors.reader.open_model import TensorSlice as TensorSlice
    from actors.reader.open_model import safe_open as safe_open
    from actors.saving.background import asave as asave
    from actors.saving.conversion import ConvertReport as ConvertReport
    from actors.saving.convert import aconvert as aconvert
    from actors.saving.convert import convert as convert
    from actors.saving.handles import SaveHandle as SaveHandle
    from actors.saving.loaded import save_loaded as save_loaded
    from actors.saving.save import SaveReport as SaveReport
    from actors.saving.save import save as save
    from actors.saving.training_state import load_training_state as load_training_state
    from cluster.client import aload as aload
    from cluster.client import arelease as arelease
    from cluster.client import ascale as ascale
    from cluster.client import astatus as astatus
    from cluster.client import aupdate as aupdate
    from cluster.client import load as load
    from cluster.client import release as release
    from cluster.client import scale as scale
    from cluster.client import status as status
    from cluster.client import update as update
    from cluster.config import Config as Config
    from cluster.errors import AgentEnded as AgentEnded
    from cluster.errors import BrokenCheckpointFile as BrokenCheckpointFile
    from cluster.errors import CallTimeout as CallTimeout
    from cluster.errors import ChunkFailed as ChunkFailed
    from cluster.errors import ClusterError as ClusterError
    from cluster.errors import ClusterLost as ClusterLost
    from cluster.errors import ConfigError as ConfigError
    from cluster.errors import ConvertError as ConvertError
    from cluster.errors import DeviceUnavailable as DeviceUnavailable
    from cluster.errors import DoesNotFit as DoesNotFit
    from cluster.errors import DoesNotFitNow as DoesNotFitNow
    from cluster.errors import IllegalTransition as IllegalTransition
    from cluster.errors import LayoutError as LayoutError
    from cluster.errors import LoadCancelled as LoadCancelled
    from cluster.errors import LoadError as LoadError
    from cluster.errors import LoadForgotten as LoadForgotten
    from cluster.errors import LoadTimeout as LoadTimeout
    from cluster.errors import ModelBroken as ModelBroken
    from cluster.errors import ModelConfigError as ModelConfigError
    from cluster.errors import ModelNotFound as ModelNotFound
    from cluster.errors import ModuleMismatch as ModuleMismatch
    from cluster.errors import NoCoordinator as NoCoordinator
    from cluster.errors import NodeLost as NodeLost
    from cluster.errors import NoRoomToStage as NoRoomToStage
    from cluster.errors import NotEnoughResources as NotEnoughResources
    from cluster.errors import PackageMissing as PackageMissing
    from cluster.errors import PlanError as PlanError
    from cluster.errors import RankLost as RankLost
    from cluster.errors import RankRemoved as RankRemoved
    from cluster.errors import RankTaken as RankTaken
    from cluster.errors import ReaderClosed as ReaderClosed
    from cluster.errors import RemoteCallFailed as RemoteCallFailed
    from cluster.errors import SaveConflict as SaveConflict
    from cluster.errors import SaveError as SaveError
    from cluster.errors import SaveRefused as SaveRefused
    from cluster.errors import ScaleFailed as ScaleFailed
    from cluster.errors import ScaleRefused as ScaleRefused
    from cluster.errors import TensorNotFound as TensorNotFound
    from cluster.errors import UnknownFamily as UnknownFamily
    from cluster.errors import UnsafePickle as UnsafePickle
    from cluster.errors import UpdateFailed as UpdateFailed
    from cluster.errors import UpdateRefused as UpdateRefused
    from cluster.errors import VersionMismatch as VersionMismatch
    from cluster.model import LoadedModel as LoadedModel
    from cluster.planning.plan_summary import PlanSummary as PlanSummary
    from cluster.planning.preview import aplan as aplan
    from cluster.planning.preview import plan as plan
    from cluster.publishing import apublish as apublish
    from cluster.publishing import asign as asign
    from cluster.publishing import averify as averify
    from cluster.publishing import generate_key as generate_key
    from cluster.publishing import publish as publish
    from cluster.publishing import sign as sign
    from cluster.publishing import verify as verify
    from cluster.small_files import config_folder as config_folder
    from cluster.telemetry.report import ClusterStatus as ClusterStatus
    from cluster.telemetry.report import LoadProgress as LoadProgress
    from cluster.telemetry.report import LoadReport as LoadReport
    from cluster.telemetry.scale_report import ScaleReport as ScaleReport
    from cluster.telemetry.update_report import UpdateReport as UpdateReport
    from longshore.installation import PackageShadowed as PackageShadowed
    from longshore.installation import __version__ as __version__
    from storage.errors import AccessDenied as AccessDenied
    from storage.errors import ArenaBusy as ArenaBusy
    from storage.errors import ArenaCorrupt as ArenaCorrupt
    from storage.errors import ArenaError as ArenaError
    from storage.errors import ArenaTooLarge as ArenaTooLarge
    from storage.errors import ArenaTooSmall as ArenaTooSmall
    from storage.errors import BadSignature as BadSignature
    from storage.errors import CheckpointError as CheckpointError
    from storage.errors import CredentialsExpired as CredentialsExpired
    from storage.errors import DependencyChanged as DependencyChanged
    from storage.errors import DiskChunkUnusable as DiskChunkUnusable
    from storage.errors import DiskTierError as DiskTierError
    from storage.errors import IntegrityError as IntegrityError
    from storage.errors import InvalidAmax as InvalidAmax
    from storage.errors import InvalidHeader as InvalidHeader
    from storage.errors import InvalidIndex as InvalidIndex
    from storage.errors import InvalidKey as InvalidKey
    from storage.errors import InvalidManifest as InvalidManifest
    from storage.errors import InvalidState as InvalidState
    from storage.errors import InvalidUri as InvalidUri
    from storage.errors import LongshoreError as LongshoreError
    from storage.errors import ManifestError as ManifestError
    from storage.errors import ManifestMismatch as ManifestMismatch
    from storage.errors import ManifestUnsigned as ManifestUnsigned
    from storage.errors import NewerManifest as NewerManifest
    from storage.errors import NotACheckpoint as NotACheckpoint
    from storage.errors import ObjectChanged as ObjectChanged
    from storage.errors import ObjectNotFound as ObjectNotFound
    from storage.errors import PeerUnavailable as PeerUnavailable
    from storage.errors import PickleRefused as PickleRefused
    from storage.errors import ProxyRefused as ProxyRefused
    from storage.errors import PublishError as PublishError
    from storage.errors import RangeMismatch as RangeMismatch
    from storage.errors import ReadEnded as ReadEnded
    from storage.errors import RevisionMismatch as RevisionMismatch
    from storage.errors import ShortRead as ShortRead
    from storage.errors import SignatureError as SignatureError
    from storage.errors import SignedNameMismatch as SignedNameMismatch
    from storage.errors import SigningUnavailable as SigningUnavailable
    from storage.errors import SourceRefused as SourceRefused
    from storage.errors import StoreError as StoreError
    from storage.errors import StoreUnavailable as StoreUnavailable
    from storage.errors import Throttled as Throttled
    from storage.errors import UnknownSigner as UnknownSigner
    from storage.errors import UnsupportedStore as UnsupportedStore
    from storage.errors import WeakDigest as WeakDigest
    from storage.publishing.publish import PublishReport as PublishReport
    from storage.publishing.verify import VerifyReport as VerifyReport

# module -> public names that live there; the block above tells type checkers the same (a test compares them)
_EXPORTS = {
    "actors.hosting": "host_rank",
    "actors.reader.open_model": "OpenModel TensorSlice safe_open",
    "actors.saving.background": "asave",
    "actors.saving.handles": "SaveHandle",
    "actors.saving.loaded": "save_loaded",
    "actors.saving.conversion": "ConvertReport",
    "actors.saving.convert": "aconvert convert",
    "actors.saving.save": "SaveReport save",
    "actors.saving.training_state": "load_training_state",
    "cluster.client": "aload arelease ascale astatus aupdate load release scale status update",
    "cluster.publishing": "apublish asign averify generate_key publish sign verify",
    "cluster.config": "Config",
    "cluster.small_files": "config_folder",
    "cluster.errors": (
        "AgentEnded BrokenCheckpointFile CallTimeout ChunkFailed ClusterError ClusterLost ConfigError ConvertError "
        "DeviceUnavailable DoesNotFit DoesNotFitNow IllegalTransition LayoutError LoadCancelled LoadError "
        "LoadForgotten LoadTimeout ModelBroken ModelConfigError ModelNotFound ModuleMismatch NoCoordinator "
        "NoRoomToStage NodeLost NotEnoughResources PackageMissing PlanError RankLost RankRemoved RankTaken "
        "ReaderClosed RemoteCallFailed SaveConflict SaveError SaveRefused ScaleFailed ScaleRefused TensorNotFound "
        "UnknownFamily UnsafePickle UpdateFailed UpdateRefused VersionMismatch"
    ),
    "cluster.model": "LoadedModel",
    "cluster.planning.preview": "aplan plan",
    "cluster.planning.plan_summary": "PlanSummary",
    "cluster.telemetry.report": "ClusterStatus LoadProgress LoadReport",
    "cluster.telemetry.scale_report": "ScaleReport",
    "cluster.telemetry.update_report": "UpdateReport",
    "longshore.installation": "PackageShadowed __version__",
    "storage.errors": (
        "AccessDenied ArenaBusy ArenaCorrupt ArenaError ArenaTooLarge ArenaTooSmall BadSignature "
        "CheckpointError CredentialsExpired DependencyChanged DiskChunkUnusable DiskTierError IntegrityError "
        "InvalidAmax "
        "InvalidHeader InvalidIndex InvalidKey InvalidManifest InvalidState InvalidUri LongshoreError "
        "ManifestError "
        "ManifestMismatch ManifestUnsigned NewerManifest NotACheckpoint ObjectChanged ObjectNotFound PickleRefused "
        "PeerUnavailable ProxyRefused PublishError RangeMismatch ReadEnded RevisionMismatch ShortRead SignatureError "
        "SignedNameMismatch SigningUnavailable SourceRefused StoreError StoreUnavailable Throttled UnknownSigner "
        "UnsupportedStore WeakDigest"
    ),
    "storage.publishing.publish": "PublishReport",
    "storage.publishing.verify": "VerifyReport",
}
_HOME_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers would take a list that is worked out for an empty one
    __all__ = sorted(_HOME_OF)

check_packages()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cluster' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
