"""Ray Serve LLM with a model in a store, without a download of its weights.

    LLMConfig(
        model_loading_config={"model_id": "llama-8b", "model_source": "s3://models/llama-8b"},
        callback_config={"callback_class": "engines.ray_serve.ConfigFolder"},
    )

Ray would download the whole model to each node of a replica before vLLM begins. The callback makes the folder of
`longshore config-folder` there instead, and vLLM reads the weights with the load format "longshore":

    replica      on_before_node_init                            makes the folder, which fixes the revision
    each node    on_before_download_model_files_distributed     makes the same folder, of the same revision
    vLLM         load_format="longshore"                        finds in the folder where the weights are

Ray pickles the callback on its way from the replica to the nodes, so the package must be on each of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from actors.launch import start_agent_here
from actors.reader.host import AGENT_S
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.joining.ray_private import serve_llm_callback
from cluster.small_files import LOAD_FORMAT, OPTIONS, ModelSource, config_folder, read_source
from storage.problems import quote


class ConfigFolder(serve_llm_callback()):  # type: ignore[misc]  # a class of Ray, which has no public name
    """Gives vLLM a folder with a model's config and tokenizer, on each node. Ray makes it in each replica."""

    def __init__(
        self,
        llm_config: Any,
        raise_error_on_callback: bool = True,
        ctx_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            llm_config: The LLMConfig. Its `model_source` is the model's URI; the default load format becomes
                "longshore".
            raise_error_on_callback: Ignored: an error always ends the replica, or vLLM would look for the model on a
                hub.
            ctx_kwargs: Ray's own.
            options: `callback_kwargs` of the LLMConfig: `revision`, `code` and the options of the store, as for
                `config_folder`. Without `revision`, each replica has the newest of its start. `code` is by default
                what `trust_remote_code` says.

        Raises:
            ConfigError: There is no model_source, another load format, or an unknown option.
        """
        super().__init__(llm_config=llm_config, raise_error_on_callback=True, ctx_kwargs=ctx_kwargs)
        if unknown := set(options) - {*OPTIONS, "revision", "code"}:
            raise ConfigError(
                f"unknown callback_kwargs: {', '.join(map(quote, sorted(unknown)))}",
                hint=f"known are {', '.join(sorted({*OPTIONS, 'revision', 'code'}))}",
            )
        source = llm_config.model_loading_config.model_source
        uri = source if isinstance(source, str) else getattr(source, "bucket_uri", None)
        if not uri:
            raise ConfigError("the LLMConfig has no model_source", hint='pass model_source="s3://..."')
        found = llm_config.engine_kwargs.get("load_format")
        if found not in (None, LOAD_FORMAT):
            raise ConfigError(f"the load format is {quote(str(found))}", hint=f'leave it out, or name "{LOAD_FORMAT}"')
        llm_config.update_engine_kwargs(load_format=LOAD_FORMAT)
        downloads = self.ctx.worker_node_download_model
        if downloads is not None:
            self.ctx.worker_node_download_model = type(downloads).NONE
        self._uri: str = uri
        self._options = {"code": bool(llm_config.engine_kwargs.get("trust_remote_code")), **options}
        self._folder = ""
        self._source: ModelSource | None = None

    async def on_before_node_init(self) -> None:
        """Make the folder where the replica runs, and let vLLM use it. Raises as `config_folder`."""
        self._folder = await asyncio.to_thread(config_folder, self._uri, **self._options)
        self._source = read_source(self._folder)
        self.llm_config.get_engine_config().hf_model_id = self._folder

    def on_before_download_model_files_distributed(self) -> None:
        """Make the same folder on this node. Raises as `config_folder`; ConfigError if its path is another one."""
        # vLLM's workers may be no processes of Ray. With the agent, they share chunks with other nodes all the same.
        if Config.from_env().peer_port >= 0:
            start_agent_here(AGENT_S)
        if self._source is None or read_source(self._folder) == self._source:
            return
        made = config_folder(self._uri, **{**self._options, "revision": self._source.revision})
        if made != self._folder:
            raise ConfigError(
                "the nodes keep config folders in different places",
                hint="set XDG_CACHE_HOME to the same folder on all nodes",
                here=made,
                replica=self._folder,
            )
