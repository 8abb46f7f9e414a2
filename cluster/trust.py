"""Whom and where to trust: the settings of this process and what a request asks for, joined. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.config import Config
from storage.errors import UnknownSigner
from storage.publishing.signing import TrustedKey, key_id
from storage.source_rules import SourceRules


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """What one process allows. The default: the usual schemes, and unsigned manifests."""

    sources: SourceRules = field(default_factory=SourceRules)
    keys: tuple[str, ...] = ()  # as `trusted_key` writes them; empty: manifests need no signature

    @classmethod
    def of(cls, config: Config) -> TrustPolicy:
        """As the settings say."""
        return cls(config.source_rules(), config.public_keys())

    def keys_for(self, asked: Sequence[str]) -> tuple[str, ...]:
        """The keys that count for a request that trusts `asked`: it may narrow the list and never widen it.

        Raises UnknownSigner when nobody is trusted by both.
        """
        if not self.keys or not asked:
            return self.keys or tuple(asked)
        own, wanted = ([TrustedKey.parse(key) for key in keys] for keys in (self.keys, asked))
        both = dict.fromkeys(str(one.both(other)) for other in wanted for one in own if one.public == other.public)
        if not both:
            raise UnknownSigner(
                "no key is trusted both by the request and by the cluster's settings",
                hint="LONGSHORE_TRUSTED_KEYS of the coordinator's node lists the cluster's",
                trusted=",".join(sorted(key_id(key.public) for key in own)[:8]),
            )
        return tuple(both)
