"""Prints as JSON what TensorBoard itself reads of a directory: by its accumulator, and by a live server with either loader."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

top, last = sys.argv[1], int(sys.argv[2])


def number(value):
    return repr(float(value))


def accumulator(path):
    kinds = ("scalars", "images", "histograms", "tensors")
    found = EventAccumulator(path, size_guidance=dict.fromkeys(kinds, 0))
    found.Reload()
    tags = found.Tags()
    texts = [tag for tag in tags["tensors"]]
    return {
        "scalars": {tag: [[e.step, number(e.value)] for e in found.Scalars(tag)] for tag in tags["scalars"]},
        "images": {
            tag: [[e.step, e.width, e.height, e.encoded_image_string[:4].hex()] for e in found.Images(tag)]
            for tag in tags["images"]
        },
        "histograms": {
            tag: [[e.step, list(e.histogram_value.bucket_limit), list(e.histogram_value.bucket)] for e in found.Histograms(tag)]
            for tag in tags["histograms"]
        },
        "texts": {tag: [[e.step, e.tensor_proto.string_val[0].decode()] for e in found.Tensors(tag)] for tag in texts},
    }


def server(fast):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", top, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--load_fast", fast, "--reload_interval", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}/data/plugin/"

    def ask(path, **query):
        query = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{base}{path}?{query}", timeout=5) as answer:
            return json.load(answer)

    def loss():
        try:
            return ask("scalars/scalars", run=".", tag="loss")
        except (OSError, urllib.error.URLError):
            return []

    try:
        for _ in range(240):
            found = loss()
            if found and found[-1][1] == last:
                break
            time.sleep(0.25)
        images = ask("images/images", run=".", tag="figure", sample="0")
        histograms = ask("histograms/histograms", run=".", tag="spread")
        return {
            "loss": [[step, number(value)] for _, step, value in found],
            "images": [image["step"] for image in images],
            "histograms": [[step, bins] for _, step, bins in histograms],
            "texts": [[text["step"], text["text"]] for text in ask("text/text", run=".", tag="words")],
            "system": [[step, value] for _, step, value in ask("scalars/scalars", run=".", tag="system/cpu_percent")],
            "runs": sorted(ask("scalars/tags")),
        }
    finally:
        process.terminate()
        process.wait()


print(
    json.dumps(
        {
            "metrics": accumulator(top),
            "slow": server("false"),
            "fast": server("true"),
        }
    )
)
