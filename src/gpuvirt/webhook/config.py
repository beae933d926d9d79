"""The webhook's config, which is read again when its file changes: a ConfigMap as the kubelet mounts it.

The last valid config stays in use while the file is invalid or can't be read.
"""

import logging
from pathlib import Path

from gpuvirt import documents
from gpuvirt.clock import Clock
from gpuvirt.errors import ConfigError
from gpuvirt.webhook import injectionconfig
from gpuvirt.webhook.injectionconfig import InjectionConfig

log = logging.getLogger(__name__)

CHECK_S = 10.0
"""How often the file is read. The kubelet takes up to a minute to change the files of a ConfigMap."""


class WebhookConfig:
    """The config of a webhook's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.current: InjectionConfig | None = None
        """The last valid config; None before there was one."""
        self.fault: str | None = "it was not read yet"
        """Why the file as it is now is not used; None if it is."""
        self._read: str | None = None
        self.read_again()

    async def follow(self, clock: Clock) -> None:
        """Read the file again, until cancelled."""
        while True:
            await clock.sleep(CHECK_S)
            self.read_again()

    def read_again(self) -> None:
        """Read the file; keep the last valid config if it can't be used, and log that once."""
        text: str | None = None
        try:
            text = documents.text_of(self.path)
            if text == self._read and self.fault is None:
                return
            self.current = injectionconfig.parse(text, where=str(self.path))
        except ConfigError as error:
            if (fault := str(error)) != self.fault:
                then = "no pod of Kata is admitted" if self.current is None else "the last valid config is used"
                log.error("the config is not valid; %s: %s", then, fault)  # noqa: TRY400  expected
            self.fault = fault
        else:
            self.fault = None
            log.info("the config was read", extra={"classes": ",".join(sorted(self.current.classes))})
        self._read = text
