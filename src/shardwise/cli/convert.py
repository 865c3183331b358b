"""Write checkpoints in other formats: `shardwise convert`, and `shardwise export` for Hugging Face folders.

`convert` also translates another library's configuration.
"""

import time
from pathlib import Path

from ..base.errors import ConfigurationError
from ..base.text import size
from .shared import documented, num_bytes_in, progress_bar, require_exists, require_known, say, write_file

FORMATS = ("shardwise", "dcp", "hugging-face")
DTYPES = ("auto", "keep", "fp32", "bf16", "fp16", "nf4")


@documented
def convert(
    source: Path,
    target: Path | None = None,
    to: str = "shardwise",
    whole: bool = False,
    max_shard_size: str = "5GB",
    model_only: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    if target is not None and output is not None:
        raise ConfigurationError(f"DST {target} and --output {output}: give one of them")
    target = target or output
    if target is None:
        raise ConfigurationError(f"where should {source} be written? give DST, or --output")
    if source.is_file():
        _convert_configuration(source, target, overwrite)
        return
    form = require_known("--to", to.replace("_", "-"), FORMATS)
    if whole and form != "shardwise":
        raise ConfigurationError(f"--whole is for shardwise checkpoints, not for --to {form}: leave it out")
    max_bytes = num_bytes_in("--max-shard-size", max_shard_size)
    require_exists(source)
    from ..checkpoint import writer
    from ..checkpoint.opened import open_checkpoint

    opened = open_checkpoint(source)
    if model_only or form == "hugging-face":
        opened = writer.without_optimizer(opened)
    writer.require_free(target, overwrite, opened.folder, replaces_own=False)
    num_bytes = opened.index.num_bytes
    began = time.perf_counter()
    with progress_bar(target.name, num_bytes) as advance:
        if form == "shardwise":
            writer.write_own(opened, target.resolve(), None if whole else max_bytes, advance)
        elif form == "dcp":
            from ..checkpoint.interop.dcp_write import write_dcp

            write_dcp(opened, target.resolve(), advance)
        else:
            writer.write_bare_weights(opened, target.resolve(), max_bytes, advance)
    say(f"{target}: {opened.folder} as {form}, {size(num_bytes)}, in {time.perf_counter() - began:.1f} s")
    if form == "dcp" and opened.index.extra:
        say(f"torch DCP cannot store {', '.join(opened.index.extra)}: left out")


def _convert_configuration(source: Path, target: Path, overwrite: bool) -> None:
    from ..migrate.api import read
    from ..migrate.migrated import yaml_of
    from ..migrate.training_data import YOUR_DATA

    if target.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"{target}: a configuration is YAML; give a name that ends in .yaml")
    migrated = read(source)
    migrated.require_accepted()
    paths = {name: target.with_name(f"{target.stem}-{name}") for name in migrated.files}
    texts = {target: yaml_of(migrated, paths)} | {paths[name]: text for name, text in migrated.files.items()}
    for path in texts:
        if path.exists() and not overwrite:
            raise ConfigurationError(f"{path} exists already; give --overwrite to replace it")
    for path, text in texts.items():
        write_file(path, text)
    fates = [entry.fate for entry in migrated.entries]
    say(f"{target}: {fates.count('used')} keys of {source} used, {fates.count('ignored')} ignored (listed in it)")
    for path in paths.values():
        say(f"{path}: written as well; {target} names it")
    if migrated.settings.get("train_file") == (YOUR_DATA,):
        say(f"its data is not included: name yours as train_file in {target}, or with --train-file or --dataset")


@documented
def export(
    path: Path,
    out: Path,
    model: str | None = None,
    merge: bool = False,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> None:
    require_known("--dtype", dtype, DTYPES)
    max_bytes = num_bytes_in("--max-shard-size", max_shard_size)
    require_exists(path)
    from ..checkpoint.folder import newest_in
    from ..checkpoint.writer import require_free
    from ..trainer.models.export import write_export
    from ..trainer.models.restore import content_of

    place = newest_in(path)
    require_free(out, overwrite, place)
    began = time.perf_counter()
    with content_of(place, model, dtype, merge, max_bytes) as content:
        if content.facts.folder is not None:
            require_free(out, overwrite, content.facts.folder)
        with progress_bar(out.name, content.num_bytes) as advance:
            write_export(content, out.resolve(), advance)
    seconds = time.perf_counter() - began
    what = "adapters" if content.is_adapted and not content.is_merged else "model"
    say(f"{out}: the {what} of {place}, {size(content.num_bytes)}, in {seconds:.1f} s")
    if what == "adapters" and content.facts.has_weights:
        say(f"Their base model is in {content.facts.origin}; --merge writes a whole model.")
