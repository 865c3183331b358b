"""The data of a file for TRL, alignment-handbook, Axolotl or LLaMA-Factory, as settings of the trainer.

Each program names its sources in its own way. All become files (`train_file`) or datasets of the Hub (`dataset`), with
one split, one mapping of columns and one chat template for all of them. Formats need no setting: the reader finds them
by the columns of a row.

A chat template, by its name in LLaMA-Factory or Axolotl or as Jinja in the file, becomes a file for `chat_template`. A
name is written out as Jinja from `templates.yaml`. A name that stands for a family of models means the tokenizer's own
template: it is accepted for models of this family only.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..base.documents import find, json_tree, read_text
from ..base.errors import ConfigurationError, did_you_mean
from ..trainer.data import rows
from ..trainer.data.sources import OPENERS, READERS, TEXTS
from .account import Block, mapping_in
from .tables import apply_rules, table

# A placeholder: the user has to name the data. Our default for `train_file` would train on something else.
YOUR_DATA = "YOUR-DATA.jsonl"
LOADERS = ("json", "csv", "parquet", "text")  # names of readers, in the place of a dataset's name
SUFFIXES = (*READERS, *TEXTS, *OPENERS)
INFO = "dataset_info.json"
FORMAT = "the first of chosen, messages, instruction, completion and text that a row has says its format"
WHOLE_CHATS = "; of a chat only answers are trained, and TRL trains all of it: for that add train_roles: all"
TRAINED = {"train_on_inputs": ["all"], "train_on_prompt": ["all"], "mask_history": ["last"]}
# Roles, and their names; the last two are only in LLaMA-Factory's tags.
ROLES = rows.ROLES | {"observation": ("tool", "observation", "function_response"), "function": ("function_call",)}
TEMPLATE = "chat_template.jinja"
TEMPLATE_KEYS = ("template", "chat_template", "chat_template_path")


@dataclass(slots=True)
class Sources:
    """The sources of one file. What cannot hold for all of them refuses the key of the later one."""

    files: list[str] = field(default_factory=list)
    splits: dict[str, list[str]] = field(default_factory=dict)  # by dataset of the Hub
    columns: dict[str, str] = field(default_factory=dict)
    template: str | None = None  # that an entry has in Axolotl; "" if it has none
    is_text: bool = False  # rows are plain text, whatever the name of their column, and long ones are divided
    note: str = ""  # what differs for chats

    def add(self, block: Block, key: str, name: str, split: str, configuration: str) -> None:
        """Add a file, or a dataset of the Hub."""
        if name.startswith(("/", "./", "../", "~")) or name.endswith(SUFFIXES) or find(name) is not None:
            self.files.append(name)
            block.used(key, f"train_file {', '.join(self.files)}{self.note}")
        else:
            chosen = name if configuration.lower() in ("", "default") else f"{name}:{configuration}"
            self.splits.setdefault(chosen, []).append(split)
            block.used(key, f"dataset {chosen}, dataset_split {split}{self.note}")
        if self.splits and self.files:
            block.refused(key, "files and datasets of the Hub are not mixed in one run; download the datasets")

    def rename(self, block: Block, key: str, ours: str, theirs: str) -> None:
        if self.columns.setdefault(ours, theirs) != theirs:
            block.refused(key, f"all sources have one mapping, and {ours} is {self.columns[ours]} in another")
        block.used(key, f"columns.{ours}={theirs}")


def read_data(top: Block, folder: Path) -> None:
    """Read the sources, their columns, the messages that are trained on, and the chat template."""
    is_text = top.text("stage") == "pt" or top.has("pretraining_dataset")
    # LLaMA-Factory's `dataset` and Axolotl's `type` train on answers only.
    is_trl = "objective" not in top.settings and not top.flag("assistant_only_loss") and not top.has("base_model")
    sources, settings = Sources(is_text=is_text, note=WHOLE_CHATS if is_trl else ""), top.settings
    mixture = top.inner("dataset_mixture")
    mixture.ignored(("test_split_size", "seed"), "eval_fraction of the samples, which the seed shuffles, are held out")
    for block in (*top.inner_list("datasets"), *top.inner_list("pretraining_dataset"), *mixture.inner_list("datasets")):
        _read_entry(block, sources, (block.first_of("path", "id"), block.first_of("name", "config"), "split"))
    if top.has("dataset_name"):
        _read_source(top, sources, ("dataset_name", "dataset_config", "dataset_train_split"), ())
    top.ignored(("dataset_config", "dataset_train_split"), "dataset_name is missing")
    _read_mixer(top, sources)
    sources.note = ""
    _read_info(top, folder, sources)
    if sources.is_text and not any(map(top.has, ("packing", "sample_packing"))):
        settings["packing"] = "packed"
    if top.has("dataset_text_field"):
        sources.rename(top, "dataset_text_field", "text", top.text("dataset_text_field"))
    _read_max_samples(top, sources)
    for key, roles in TRAINED.items():
        _set_roles(top, key, roles if top.flag(key) else [])
    _read_template(top, sources.template or "")
    _read_tokens(top)
    split, *others = dict.fromkeys("+".join(dict.fromkeys(splits)) for splits in sources.splits.values()) or [""]
    if others:
        keys = ("datasets", "dataset_mixture", "dataset_mixer", "dataset")
        top.refused(keys, f"one split is read of all datasets, and they have {split} and {others[0]}")
    if sources.splits:
        settings |= {"dataset": tuple(sources.splits), "dataset_split": split}
    elif sources.files or "model" in settings:
        settings["train_file"] = tuple(sources.files) or (YOUR_DATA,)
    columns = {ours: theirs for ours, theirs in sources.columns.items() if ours != theirs}
    settings |= {"columns": columns} if columns else {}


def _read_source(block: Block, sources: Sources, keys: tuple[str, str, str], files: Sequence[str]) -> None:
    """Read what is loaded: the keys of its name, of its configuration and of its split; or files."""
    key, configuration_key, split_key = keys
    name = block.text(key) or (LOADERS[0] if files else "")
    configuration, split = block.text(configuration_key), block.text(split_key, "train")
    block.used(
        (configuration_key, split_key), f"dataset_split {split} of the configuration {configuration or 'default'}"
    )
    if not name or "://" in name or (name in LOADERS) != bool(files):
        written = [key] if block.has(key) else list(block.values)[:1]
        block.refused(written, "a source is a local file, a dataset of the Hub, or json with data_files")
    for one in files or [name] * bool(name):
        sources.add(block, key, one, split, configuration)


def _read_entry(block: Block, sources: Sources, keys: tuple[str, str, str]) -> None:
    """Read an entry of Axolotl (with a `type`), TRL, alignment-handbook, or LLaMA-Factory's dataset_info.json."""
    apply_rules(block, "hugging_face", "dataset")
    files = block.texts("data_files")
    _read_source(block, sources, keys, files)
    block.used("data_files", f"train_file {', '.join(files)}")
    if not isinstance(block.values.get("type"), dict):
        _read_type(block, sources)
    _read_names(block, sources)
    _set_roles(block, "roles_to_train", block.texts("roles_to_train"))


def _read_type(block: Block, sources: Sources) -> None:
    """Read Axolotl's `type`, and the chat template that it or the entry has."""
    types, known, written = table("hugging_face")["dataset_types"], table("templates"), block.text("type")
    name, _, column = written.partition(":")
    means = {"text": column} if name == "completion" and column else types.get(written, {})
    sources.is_text |= written.startswith(("completion", "pretrain"))
    template = means.get("template") or block.text("chat_template").removeprefix("tokenizer_default")
    if written and not means and written not in types:
        block.refused("type", f"rows of this type are not read; {did_you_mean(written, types)}")
    if template and known["same"].get(template, template) not in known["templates"]:
        block.refused("chat_template", f"{did_you_mean(template, known['templates'])}; or give it with --chat-template")
        return
    if sources.template not in (None, template):
        key = block.first_of("type", "chat_template")
        block.refused(key, "rows of one run have one template, and another source has another one")
    sources.template = template
    block.used("chat_template", f"chat_template {template}")
    note = f", and the chat template {template}: an input follows its instruction in the next line" if template else ""
    block.used("type", f"{FORMAT}{note}")
    for ours in means.keys() - {"template"}:
        sources.rename(block, "type", ours, means[ours])


def _read_names(block: Block, sources: Sources) -> None:
    """Read the names of columns, of the parts of a message, and of roles, in the entry and in its inner blocks."""
    known, tags = table("hugging_face"), block.inner("tags")
    inner_blocks = [block.inner(key) for key in known["name_blocks"] if isinstance(block.values.get(key), dict)]
    for inner in (block, *inner_blocks):
        for key in filter(inner.has, inner.values):
            ours = "text" if sources.is_text and key == "prompt" else known["names"].get(key)
            if ours is not None:
                sources.rename(inner, key, ours, inner.text(key))
            elif inner not in (block, tags):
                inner.refused(key, "columns and parts of messages of this kind are not read here")
    columns = block.texts("columns") if isinstance(block.values.get("columns"), list) else []
    for column in set(columns) - {*known["names"].values(), "prompt", "conversations"}:
        block.refused("columns", f"the column {column} is not read here")
    block.used("columns", FORMAT)
    for inner in (block.inner("roles"), tags):
        for key in (key for key in inner.values if inner is not tags or key not in known["names"]):
            names = ROLES.get(key.removesuffix("_tag"), ())
            if set(inner.texts(key)) - set(names):
                inner.refused(key, f"names of this role that are known here: {', '.join(names) or 'none'}")
            inner.used(key, "these names of a role are known")


def _read_mixer(top: Block, sources: Sources) -> None:
    """Read alignment-handbook's older form: datasets with the part of each, and splits and configurations for all."""
    mixer = top.inner("dataset_mixer")
    names = [*top.texts("dataset_configs"), *[""] * len(mixer.values)]
    splits = [split for split in top.texts("dataset_splits", ["train"]) if "train" in split]
    for name, configuration in zip(mixer.values, names, strict=False):
        if mixer.number(name, 1.0) != 1 or not splits:
            mixer.refused(name, "all rows of a split for training are read; write dataset_splits, as in train[:50%]")
        for split in splits:
            sources.add(mixer, name, name, split, configuration)
    top.used(("dataset_splits", "dataset_configs"), f"dataset_split {'+'.join(splits)} of these configurations")


def _read_info(top: Block, folder: Path, sources: Sources) -> None:
    """Read LLaMA-Factory's `dataset`: names in a dataset_info.json of `dataset_dir`, which says where the rows are."""
    names, place = top.texts("dataset"), top.text("dataset_dir", "data")
    top.used("dataset_dir", f"{INFO} in it says where the rows are")
    if not names:
        top.ignored("dataset", "it is empty")
        return
    near = Path(place) if (Path(place) / INFO).exists() else folder / place
    try:
        info = mapping_in(near / INFO)
    except ConfigurationError as error:
        top.refused("dataset", f"{error}; it says where the rows are")
        return
    holder = top.inner_mapping("dataset", {name: info[name] for name in names if isinstance(info.get(name), dict)})
    for name in names:
        block = holder.inner(name)
        if not block.values:
            top.refused("dataset", f"{name} is not in {near / INFO}; {did_you_mean(name, info)}")
            continue
        if block.has("file_name"):
            block.values = {**block.values, "file_name": str(near / block.text("file_name"))}
        _read_entry(block, sources, (block.first_of("hf_hub_url", "file_name"), "subset", "split"))
    top.used("dataset", f"read from {near / INFO}: the entries follow")


def _read_max_samples(top: Block, sources: Sources) -> None:
    """Read the largest number of rows of each source: a split of the Hub can be cut, but files are read as a whole."""
    most = top.whole("max_samples", 0, least=1)
    for splits in sources.splits.values() if most else ():
        splits[:] = [split if "[" in split else f"{split}[:{most}]" for split in splits]
    counts = {name: _num_rows(Path(name)) for name in sources.files} if top.has("max_samples") else {}
    long = [name for name, count in counts.items() if not 0 < count <= most]
    if long or not (counts or sources.splits):
        of = (
            f"{long[0]} has {counts[long[0]] or 'an unknown number of'}"
            if long
            else "the data is unknown, and has all its"
        )
        top.refused("max_samples", f"{of} rows, and all are read; cut the file, and leave this out")
    top.used_if(bool(sources.splits), "max_samples", f"dataset_split ...[:{most}]", "no file has more rows")


def _num_rows(path: Path) -> int:
    """Count the rows of a small file; 0 if that is not possible."""
    try:
        text = read_text(path)
        return len(json_tree(text, "")) if path.suffix == ".json" else sum(map(bool, map(str.strip, text.splitlines())))
    except (ConfigurationError, TypeError):
        return 0


def _set_roles(block: Block, key: str, roles: Iterable[str]) -> None:
    """Set the roles whose messages are trained on."""
    names = tuple(next((ours for ours, names in ROLES.items() if role in names), role) for role in roles)
    if set(names) - {*ROLES, "all", "last"}:
        block.refused(key, f"roles are {', '.join(ROLES)}")
    elif names not in ((), ("assistant",)) and block.settings.setdefault("train_roles", names) != names:
        block.refused(key, "all sources train the same roles")
    block.used_if(bool(names), key, f"train_roles {', '.join(names)}", "only answers are trained")


# The chat template and special tokens


def _read_template(top: Block, implied: str) -> None:
    """Read the chat template. `implied` is the one that the type of the rows has in Axolotl, or nothing."""
    key = top.first_of(*TEMPLATE_KEYS)
    if top.has("chat_template_jinja"):
        top.used(key, "chat_template_jinja has it")
        key = "chat_template_jinja"
    written = str(top.values[key]).strip() if top.has(key) else ""
    is_text = "{%" in written or "{{" in written
    top.ignored(key, "it is empty")
    if implied:
        top.ignored(key, f"the rows' type has the template {implied}")
        _write_template(top, [], jinja_of(implied), "")
    elif is_text:
        _write_template(top, key, written, "the text of this key")
    elif key.endswith(("path", "jinja")) and find(written) is not None:
        top.sets(key, chat_template=written)
    elif written:
        _read_template_name(top, key, top.text(key))


def _read_tokens(top: Block) -> None:
    """Read special tokens. The padding token is never a target; others must be those of the model's own tokenizer."""
    model = f"{top.settings.get('model', '')} {top.text('tokenizer_type')}".lower()
    families = table("hugging_face")["own_tokens"].items()
    own = [token for family, tokens in families if family in model for token in tokens]
    for key in ("special_tokens", "tokens"):
        value = top.values[key] if top.has(key) else None
        named = value.items() if isinstance(value, dict) else enumerate(value or ())
        changed = [token for name, token in named if token is not None and name != "pad_token" and token not in own]
        if changed:
            fix = "save a changed tokenizer and model, and name those"
            top.refused(key, f"a tokenizer stays as it is, and {changed[0]} may change it; {fix}")
        top.ignored(key, "the model's tokenizer has them; padding is never trained on")


def _write_template(top: Block, keys: str | list[str], text: str, what: str) -> None:
    top.files[TEMPLATE] = text
    top.sets(keys, f", a file that convert writes: {what}", chat_template=TEMPLATE)


def _read_template_name(top: Block, key: str, name: str) -> None:
    known = table("templates")
    family = known["families"].get(name, "") if key == "chat_template" else ""
    same = "" if family else known["same"].get(name, name)
    if name.startswith("tokenizer_default"):
        top.used(key, "the tokenizer's own template")
    elif family and family in str(top.settings.get("model", "")).lower():
        top.used(key, f"the tokenizer's own template, of which {name} is a copy")
    elif same in known["templates"]:
        _write_template(top, key, jinja_of(same), f"{name}, without tools")
    else:
        fix = f"it belongs to {family} models" if family else did_you_mean(name, known["templates"])
        top.refused(key, f"{fix}; leave it out for the tokenizer's own template, or give yours with --chat-template")


def jinja_of(name: str) -> str:
    """A template of the table as Jinja."""
    known = table("templates")
    parts = json.dumps(known["templates"][known["same"].get(name, name)], ensure_ascii=False)
    return f"{{%- set t = {parts} -%}}\n{known['frame']}"
