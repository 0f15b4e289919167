"""Install the engines that `edge_peers.py` compares with, and give each the built-in model.

    make peers

Each gets an environment under `.peers/` from its file in `benchmarks/peers/`; what is there
already stays. One that cannot be installed is told, and the others go on.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from peer_list import PEERS, Q8_0, Peer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_core.models import BUILTIN, ModelStore


def main() -> int:
    """Install what is missing; return how many peers cannot be measured."""
    missing = 0
    for peer in PEERS:
        try:
            install(peer)
            make_model(peer)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{peer.name}: {error}; going on without it", file=sys.stderr)
            missing += 1
        else:
            print(f"{peer.name}: ready")
    return missing


def install(peer: Peer) -> None:
    """Make the peer's environment, unless it has what it should have."""
    if peer.installed:
        return
    print(f"{peer.name}: installing ({peer.cost}) ...", flush=True)
    venv.create(peer.folder, clear=True, with_pip=True)
    pip = [str(peer.python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "-r", str(peer.requirements)], check=True)
    shutil.copy(peer.requirements, peer.installed_requirements)


def make_model(peer: Peer) -> None:
    """Write the built-in model in the peer's form, complete or not at all."""
    if peer.model.exists():
        return
    print(f"{peer.name}: writing {peer.model.name} ...", flush=True)
    peer.model.parent.mkdir(exist_ok=True)
    source = ModelStore().pull(BUILTIN).path
    with tempfile.TemporaryDirectory(dir=peer.model.parent) as folder:
        unfinished = Path(folder) / peer.model.name
        if peer.model == Q8_0:
            write_q8_0(source, unfinished)
        else:
            write_genai(source, unfinished, peer.python)
        unfinished.rename(peer.model)


def write_q8_0(source: Path, target: Path) -> None:
    """Quantise every matrix of a GGUF file to Q8_0, as llama.cpp's own tool does."""
    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(target, fields.pop("general.architecture").contents())
    del fields["general.file_type"]
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for name, field in fields.items():
        kind = field.types[0]
        of = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, of)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_genai(source: Path, target: Path, python: Path) -> None:
    """Let onnxruntime-genai's builder make its INT8 folder from full-precision weights."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        options = {"gguf_file": source.name}
        AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.float32, **options
        ).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(folder)
        build = [str(python), "-m", "onnxruntime_genai.models.builder", "-p", "int8", "-e", "cpu"]
        build += ["-i", folder, "-o", str(target), "-c", f"{folder}/cache"]
        built = subprocess.run(
            build, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if built.returncode:
            print(built.stderr[-2000:], file=sys.stderr)  # it says a great deal before
        built.check_returncode()


if __name__ == "__main__":
    sys.exit(main())
