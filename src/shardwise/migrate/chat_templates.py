"""Chat templates: names of LLaMA-Factory and Axolotl, or Jinja in the file, as a file for `chat_template`.

A name is written out as Jinja from `templates.yaml`. A name that stands for a family of models means the tokenizer's
own template: it is accepted for models of this family only.
"""

import json

from ..base.documents import find
from ..base.errors import did_you_mean
from .account import Block
from .tables import table

FILE = "chat_template.jinja"
KEYS = ("template", "chat_template", "chat_template_path")


def read_template(top: Block, implied: str) -> None:
    """Read the chat template. `implied` is the one that the type of the rows has in Axolotl, or nothing."""
    key = top.first_of(*KEYS)
    if top.has("chat_template_jinja"):
        top.used(key, "chat_template_jinja has it")
        key = "chat_template_jinja"
    written = str(top.values[key]).strip() if top.has(key) else ""
    is_text = "{%" in written or "{{" in written
    top.ignored(key, "it is empty")
    if implied:
        top.ignored(key, f"the rows' type has the template {implied}")
        _write(top, [], jinja_of(implied), "")
    elif is_text:
        _write(top, key, written, "the text of this key")
    elif key.endswith(("path", "jinja")) and find(written) is not None:
        top.sets(key, chat_template=written)
    elif written:
        _read_name(top, key, top.text(key))


def read_tokens(top: Block) -> None:
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


def _write(top: Block, keys: str | list[str], text: str, what: str) -> None:
    top.files[FILE] = text
    top.sets(keys, f", a file that convert writes: {what}", chat_template=FILE)


def _read_name(top: Block, key: str, name: str) -> None:
    known = table("templates")
    family = known["families"].get(name, "") if key == "chat_template" else ""
    same = "" if family else known["same"].get(name, name)
    if name.startswith("tokenizer_default"):
        top.used(key, "the tokenizer's own template")
    elif family and family in str(top.settings.get("model", "")).lower():
        top.used(key, f"the tokenizer's own template, of which {name} is a copy")
    elif same in known["templates"]:
        _write(top, key, jinja_of(same), f"{name}, without tools")
    else:
        fix = f"it belongs to {family} models" if family else did_you_mean(name, known["templates"])
        top.refused(key, f"{fix}; leave it out for the tokenizer's own template, or give yours with --chat-template")


def jinja_of(name: str) -> str:
    """A template of the table as Jinja."""
    known = table("templates")
    parts = json.dumps(known["templates"][known["same"].get(name, name)], ensure_ascii=False)
    return f"{{%- set t = {parts} -%}}\n{known['frame']}"
