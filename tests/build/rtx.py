"""TensorRT-RTX asked what it makes of ONNX files: run as a program, which prints JSON.

A process of its own, since the parser opens `libtensorrt_rtx.so`, a name that the wheel lacks and
that the loader looks for only where a process was told at its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def ask(plugins: Path, library: Path, folder: Path, *files: Path, alias: bool = True) -> Any:
    """What is registered, and what each file is parsed to and, for sizes of one, built to.

    Parameters
    ----------
    plugins : library of the five ops
    library : of TensorRT-RTX
    folder : to put a link to it
    alias : let plugins write their inputs
    """
    link = folder / "libtensorrt_rtx.so"
    if not link.exists():
        link.symlink_to(library)
    command = [sys.executable, "-m", __name__, str(plugins), str(int(alias)), *map(str, files)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def _main(plugins: str, alias: str, *files: str) -> None:
    import tensorrt_rtx as trt

    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    log = Log()
    builder = trt.Builder(log)
    registry = trt.get_plugin_registry()
    assert registry.load_library(plugins) is not None, log.errors
    creators = {
        (creator.name, creator.plugin_version): {
            field.name: field.type.name for field in creator.field_names
        }
        for creator in registry.all_creators
        if creator.plugin_namespace == "dustin"
    }
    answers = []
    for file in files:
        log.errors.clear()
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, log)
        assert parser.parse_from_file(file), log.errors
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        ours = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
        config = builder.create_builder_config()
        aliased = trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03
        config.set_preview_feature(aliased, bool(int(alias)))
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        profile = builder.create_optimization_profile()
        for tensor in (network.get_input(i) for i in range(network.num_inputs)):
            if -1 in (shape := list(tensor.shape)):
                profile.set_shape(tensor.name, *[[abs(size) for size in shape]] * 3)
        config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
        answers.append({
            "plugins": [
                (layer.name.split("_")[1], [
                    (tensor.name, list(tensor.shape), tensor.dtype.name)
                    for tensor in map(layer.get_output, range(layer.num_outputs))
                ])
                for layer in ours
            ],
            "built": engine is not None,
            "errors": log.errors[:],
        })  # fmt: skip
    print(json.dumps({"creators": sorted(creators.items()), "files": answers}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
