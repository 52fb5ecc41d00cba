"""A headless Chromium driven over two pipes by its own protocol (JSON, each message ended by a zero byte)."""

import json
import os
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
# A page that asks for anything from elsewhere gets nothing, and the request is told.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


def chromium() -> str | None:
    """Return the path of an installed Chromium, None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. It reads commands from file 3 and answers on file 4."""

    def __init__(self, path: str) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._number = 0
        self._folder = TemporaryDirectory()
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        # The child finds both pipes under the numbers that it expects, whatever they are here.
        shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        switches = [*SWITCHES, OFFLINE, f"--user-data-dir={self._folder.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *switches], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._read = os.fdopen(self._from, "rb")
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        self._process.kill()
        self._process.wait()
        self._read.close()
        self._folder.cleanup()

    def ask(self, method: str, **parameters: object) -> dict:
        """Send one command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict:
        text = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has gone"
            text += byte
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is loaded."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=path.absolute().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> object:
        """Return what an expression gives, promises awaited."""
        result = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(b64decode(shot["data"]))
