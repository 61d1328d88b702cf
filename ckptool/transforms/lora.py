"""Merge low-rank adapters (LoRA, DoRA) into the weights of their base model."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from glob import escape as escaped_glob
from typing import Any, NoReturn

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import TensorRef, replace_elements, row_major_strides
from ckptool.core.names import PEFT
from ckptool.core.placeholders import refuse_placeholders
from ckptool.core.sections import Section, find_model_state_dict, get_named_tensors
from ckptool.errors import LimitExceeded, NotFound, NotRepresentable, UsageError
from ckptool.files.place import place_of
from ckptool.limits import DEFAULT_LIMITS
from ckptool.tensors.lora import Factors, Merger
from ckptool.transforms.casting import FLOATING
from ckptool.transforms.dequantizing import refuse_dependent_tensors
from ckptool.transforms.names import Rename, replace_entries
from ckptool.words import counted, listed, printable, shell

_DOWN = r"lora_A|lora_embedding_A|lora[._](?:linear_layer\.)?down"
_UP = r"lora_B|lora_embedding_B|lora[._](?:linear_layer\.)?up"
_PART = re.compile(
    rf"(?P<module>.+?)\.(?:(?P<down>{_DOWN})|(?P<up>{_UP})|(?P<magnitude>lora_magnitude_vector)"
    r"|(?P<alpha>alpha))(?:\.(?!(?:weight|bias)$)(?P<adapter>\w+))?(?:\.weight)?"
)
"""A key of an adapter: its module, one of four roles, and the name of the adapter, if any."""
_UNSUPPORTED_PART = re.compile(
    r"\.(hada_|lokr_|oft_|boft_|vera_|ia3_|dora_scale|lora_\w+|trainable_tokens_"
    r"|(?:w_norm|b_norm|diff|diff_b)$)"
)
_KOHYA_PREFIX = re.compile(r"lora_(?:unet|te\d?|text_encoder\d?|transformer|prior)_")
_PEFT_RENAMES = (
    r"^base_model\.model\.=>",
    r"\.base_layer(?=\.)=>",
    r"\.modules_to_save\.\w+(?=\.)=>",
)
"""The renames from keys of a PeftModel to keys of its model."""
_SLOW_PATTERN = re.compile(r"\)[*+{]|((?<!\()[*+?{].*){4}", re.DOTALL)
"""A pattern with a repeated group or four repeats, which may take forever to match."""
_MAX_MATCHED_NAME = 200
_HARMLESS_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the base."""
_UNSUPPORTED_OPTIONS = (
    "alora_invocation_tokens", "layer_replication", "lora_bias", "target_parameters",
    "trainable_token_indices", "use_qalora",
)  # fmt: skip
"""Options of PEFT that change the arithmetic."""


def merge_lora(
    base: Checkpoint,
    adapters: Sequence[Checkpoint] = (),
    *,
    scale: Sequence[float] = (),
    alpha: float | None = None,
    key: Any = None,
) -> Checkpoint:
    """Return the base with adapters merged into its weights, in order.

    A weight becomes W + scale * alpha / r * B A, computed in float32 (float64 if a tensor is
    float64) and rounded once to the dtype of the base. Without adapters, the base is the state dict
    of a PeftModel, and its keys become those of the model.

    Args:
        base: An open checkpoint, like the adapters. Keep them open until the result is written.
        adapters: In the layout of PEFT (next to `adapter_config.json`), kohya or diffusers.
        scale: One factor per adapter, or one for all.
        alpha: PEFT's `lora_alpha`, if there is no `adapter_config.json`.
        key: The path of the state dict to change.

    Raises:
        NotFound: if a tensor of an adapter has no counterpart in the base.
        UsageError: if the scale is unknown, or shapes do not match.
        NotRepresentable: if an adapter is of another kind (LoHa, ...) or the base is quantized.
    """
    scales = tuple(map(float, scale)) or (1.0,)
    count = max(len(adapters), 1)
    if len(scales) not in (1, count) or not all(map(math.isfinite, scales)):
        raise UsageError(f"scale needs one finite number, or one for each adapter ({count})")
    refuse_placeholders(base)
    section = find_model_state_dict(base, key)
    plan, changes = _Plan(base, section), list[Change]()
    own_adapter = None
    if adapters:
        _refuse_adapted(base, section)
        for file, factor in zip(adapters, scales * (count // len(scales)), strict=True):
            adapter = _Adapter.from_file(file, find_model_state_dict(file), factor, alpha)
            changes.append(plan.add_adapter(adapter))
    else:
        own_adapter = _Adapter.from_file(base, section, scales[0], alpha, is_in_base=True)
        changes.append(plan.add_adapter(own_adapter))
    dropped = own_adapter.parts if own_adapter else set()
    new_tensors = plan.merge_weights(dropped)
    items = [
        (name, new_tensors.get(name, node))
        for name, node in section.node.items()
        if name not in dropped
    ]
    result = replace_entries(base, {id(section.holder): items}, *changes)
    sources = {
        id(source): source for checkpoint in (base, *adapters) for source in checkpoint.sources
    }
    result = replace(result, sources=tuple(sources.values()))
    if not own_adapter:
        return result
    if any(section.kind == "optimizer" for section in base.sections):
        text = "the optimizer still has the state of the merged adapter"
        result = result.with_root(result.root, Change("warning", text))
    matching_rules = [  # `Rename` warns of a rule that matches nothing
        rule
        for rule in _PEFT_RENAMES
        if any(re.search(rule.removesuffix("=>"), name) for name, _ in items)
    ]
    return Rename(matching_rules, key=key)(result)


def _refuse_adapted(base: Checkpoint, section: Section) -> None:
    """Refuse a base with LoRA factors of its own, which would be applied on top of the result."""
    matches = ((name, _PART.fullmatch(name)) for name in get_named_tensors(section.node))
    factor_keys = [name for name, match in matches if match and (match["down"] or match["up"])]
    if factor_keys:
        raise UsageError(
            f"already contains an adapter ({counted(len(factor_keys), 'key')} such as "
            f"{printable(factor_keys[0])!r}), so another one cannot be merged into it",
            file=base.path,
            hint=f"merge its own adapter first: ckptool merge-lora {shell(base.path)} -o OUT "
            "--alpha N",
        )


@dataclass
class _Adapter:
    """The content of an adapter: factors by module, and tensors that replace others."""

    path: str
    factors: dict[str, Factors] = field(default_factory=dict)
    """By module."""
    saved: dict[str, TensorRef] = field(default_factory=dict)
    """The tensors that replace those of the base, by key in the adapter."""
    parts: set[str] = field(default_factory=set)
    """The keys of all its tensors in its base, and of the tensors that they replace."""
    embeddings: set[str] = field(default_factory=set)
    """The modules with factors of an embedding."""

    @classmethod
    def from_file(
        cls,
        file: Checkpoint,
        section: Section,
        scale: float,
        alpha: float | None,
        *,
        is_in_base: bool = False,
    ) -> _Adapter:
        """Return an adapter read from its own file or, with `is_in_base`, from within its base.

        Raises:
            NotFound, NotRepresentable, UsageError: if it is incomplete, or not one LoRA.
        """
        config = _Config.read(file, alpha)
        adapter = cls(file.path)
        roles_by_module = adapter._group_tensors(
            get_named_tensors(section.node), is_in_base=is_in_base
        )
        # PEFT always scales by alpha / rank. In other layouts, a missing alpha means the rank.
        is_peft = (
            is_in_base or config.is_found or any(name.startswith(PEFT) for name in section.node)
        )
        lacks_alpha = any("alpha" not in roles for roles in roles_by_module.values())
        if is_peft and config.alpha is None and lacks_alpha:
            raise UsageError(
                "the scale of the adapter is unknown: no adapter_config.json next to it "
                "has lora_alpha",
                file=file.path,
                hint="put it there, or add --alpha N with its lora_alpha, if it has neither "
                "patterns nor rslora",
            )
        for module, roles in roles_by_module.items():
            adapter._add_factors(module, roles, config, scale)
        return adapter

    def _group_tensors(
        self, tensors: Mapping[str, TensorRef], *, is_in_base: bool
    ) -> dict[str, dict[str, TensorRef]]:
        """Return the tensors of each module by role (`down`, `up`, `magnitude`, `alpha`).

        Also fills `parts` and `embeddings`, and `saved` with the other tensors of the adapter: not
        if it `is_in_base`, in the file of its base model.

        Raises:
            NotFound: if there are no factors.
            UsageError: if there are several adapters, or a module has two tensors of one role.
            NotRepresentable: if the adapter is of another kind.
        """
        matches = {name: match for name in tensors if (match := _PART.fullmatch(name))}
        matched_factors = [match for match in matches.values() if not match["alpha"]]
        roles_by_module: dict[str, dict[str, TensorRef]] = {
            match["module"]: {} for match in matched_factors
        }
        if not roles_by_module:
            raise NotFound("has no LoRA weights", file=self.path)
        if len(adapters := {match["adapter"] or "" for match in matched_factors}) > 1:
            raise UsageError(
                f"has several adapters: {listed(sorted(adapters))}",
                file=self.path,
                hint="merge them with merge_and_unload() of the PeftModel",
            )
        for name, tensor in tensors.items():
            match = matches.get(name)
            # A parameter of another module may be named alpha.
            if match and match["module"] in roles_by_module:
                roles = roles_by_module[match["module"]]
                role = next(role for role in ("down", "up", "magnitude", "alpha") if match[role])
                if role in roles:
                    raise UsageError(
                        f"{printable(match['module'])!r} has two of {match[role]}", file=self.path
                    )
                roles[role] = tensor
                if (match["down"] or "").startswith("lora_embedding"):
                    self.embeddings.add(match["module"])
                self.parts.add(name)
            elif unsupported := _UNSUPPORTED_PART.search(name):
                raise NotRepresentable(
                    f"{printable(name)!r}: merge-lora does not know {unsupported[1]}; it merges "
                    "LoRA and DoRA, not LoHa, LoKr and other adapters",
                    file=self.path,
                )
            elif is_in_base and ".original_module." in name:  # replaced by one of `modules_to_save`
                self.parts.add(name)
            elif not is_in_base:
                self.saved[name] = tensor
        return roles_by_module

    def _add_factors(
        self, module: str, roles: Mapping[str, TensorRef], config: _Config, scale: float
    ) -> None:
        """Add the factors of a module; their scale is `scale` * alpha / rank.

        alpha is that of the module in the file, else of the configuration, else the rank. rsLoRA
        divides by the root of the rank.

        Raises:
            NotFound: if one of the two factors is missing.
            NotRepresentable: if it is DoRA on an embedding.
        """
        if not {"down", "up"} <= roles.keys():
            raise NotFound(f"{printable(module)!r} has only one factor", file=self.path)
        if "magnitude" in roles and module in self.embeddings:
            raise NotRepresentable("DoRA on an embedding is not supported", file=self.path)
        down_sizes = roles["down"].sizes
        rank = (down_sizes[0] if down_sizes else 0) or 1  # 1: such a shape is refused later
        if "alpha" in roles:
            stored_alpha = _read_scalar(roles["alpha"])
            alpha = _require_number(stored_alpha, f"{printable(module)}.alpha", self.path)
        else:
            alpha = config.find_alpha(module, default=rank)
        self.factors[module] = Factors(
            roles["down"],
            roles["up"],
            scale * (alpha / (math.sqrt(rank) if config.is_rslora else rank)),
            magnitude=roles.get("magnitude"),
            transposed=config.is_transposed or module in self.embeddings,
        )

    def list_vocabulary_sizes(self) -> set[int | None]:
        """Return the numbers of rows of the embeddings, and of the matrices saved in full.

        A weight that has such a number of rows, more than in the base, is an extended vocabulary.
        """
        shapes = [_get_weight_shape(self.factors[module]) for module in self.embeddings]
        shapes += [tensor.shape for tensor in self.saved.values() if len(tensor.shape) == 2]
        return {shape[0] for shape in shapes if shape}


@dataclass(frozen=True)
class _Config:
    """The configuration of an adapter, from PEFT or `--alpha`."""

    alpha: float | None
    """The alpha of all modules without another one; None if it is unknown."""
    alpha_patterns: tuple[tuple[re.Pattern[str], float], ...] = ()
    """Patterns of modules, each with their alpha."""
    is_found: bool = False
    """True if the adapter has a configuration."""
    is_rslora: bool = False
    is_transposed: bool = False
    """True if the weights have the shape (in, out)."""

    @classmethod
    def read(cls, file: Checkpoint, alpha: float | None) -> _Config:
        """Read `adapter_config.json`, or the header of a diffusers file; without both use `alpha`.

        `alpha`, if given, applies to all modules, and replaces that of the file.

        Raises:
            NotRepresentable: if it has unsupported options.
            UsageError: if it is damaged.
        """
        path = file.path
        folder = path if place_of(path).is_folder(path) else os.path.dirname(path)
        config_path = os.path.join(folder, "adapter_config.json")
        if alpha is not None:
            alpha = _require_number(alpha, "alpha", path)
        text: str | bytes | None = file.details.header.get("lora_adapter_metadata")
        where = path  # for errors: the file with the configuration
        if place_of(config_path).is_file(config_path):
            with closing(place_of(config_path).open(config_path)) as source:
                if source.size > DEFAULT_LIMITS.max_json_bytes:
                    raise LimitExceeded(f"has {source.size:,} bytes", file=config_path)
                text, where = source.read(0, source.size), config_path
        if text is None:
            return cls(alpha)
        try:
            config: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError("is not valid JSON", file=where) from error
        _refuse_unsupported_config(config, where)
        patterns = config.get("alpha_pattern") or {}
        if alpha is not None:
            patterns = {}
        elif config.get("lora_alpha") is not None:
            alpha = _require_number(config["lora_alpha"], "lora_alpha", where)
        try:
            # Source: `get_pattern_key` of peft/utils/other.py.
            regexes = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
        except (re.error, OverflowError) as error:
            raise UsageError("alpha_pattern has no regular expression", file=where) from error
        values = [_require_number(value, "alpha_pattern", where) for value in patterns.values()]
        return cls(
            alpha,
            tuple(zip(regexes, values, strict=True)),
            is_found=True,
            is_rslora=bool(config.get("use_rslora")),
            is_transposed=bool(config.get("fan_in_fan_out")),
        )

    def find_alpha(self, module: str, default: float) -> float:
        """Return the alpha of a module: of the first matching pattern, else of all, else `default`.

        Raises:
            UsageError: if the name is too long to match patterns.
        """
        name = module.removeprefix(PEFT)
        if self.alpha_patterns and len(name) > _MAX_MATCHED_NAME:
            raise UsageError(f"{printable(name)!r} is too long to match against an alpha_pattern")
        values = (value for pattern, value in self.alpha_patterns if pattern.match(name))
        return next(values, default if self.alpha is None else self.alpha)


def _refuse_unsupported_config(config: Any, config_path: str) -> None:
    """Refuse a configuration that is not of a LoRA, or has options that change the arithmetic.

    Patterns for alpha that may take forever to match are refused too.

    Raises:
        NotRepresentable: in these cases; the message lists the options.
    """
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        raise NotRepresentable("the adapter is not a LoRA", file=config_path)
    unsupported = [name for name in _UNSUPPORTED_OPTIONS if config.get(name)]
    if config.get("init_lora_weights") not in _HARMLESS_INITIALIZATIONS:
        unsupported.append("init_lora_weights")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or any(map(_SLOW_PATTERN.search, patterns)):
        unsupported.append("such an alpha_pattern")
    if unsupported:
        raise NotRepresentable(
            f"the adapter has {listed(unsupported)}, which merge-lora does not support",
            file=config_path,
            hint="use merge_and_unload() of the PeftModel",
        )


def _require_number(value: object, name: str, file: str) -> float:
    """Return a number as a float; `name` and `file` are for messages.

    Raises:
        UsageError: if it is not a finite number.
    """
    if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UsageError(f"{name} is {value!r:.40}, expected a finite number", file=file)


def _read_scalar(tensor: TensorRef) -> object:
    """Return the value of a tensor with one element, or the tensor itself."""
    return tensor.torch().item() if tensor.numel == 1 and tensor.has_content else tensor


@dataclass
class _Plan:
    """The weights of the base that change, with their factors."""

    base: Checkpoint
    section: Section
    """The state dict of the base."""
    _added: dict[str, list[Factors]] = field(default_factory=dict)
    """The factors to add, by key in the base."""
    _replaced: dict[str, TensorRef] = field(default_factory=dict)
    """The new tensors by key in the base."""
    _base_keys: dict[str, list[str]] = field(default_factory=dict)
    """The keys in the base by key of the model."""
    _base_keys_by_kohya: dict[str, list[str]] = field(default_factory=dict)
    """The keys in the base by kohya's form of the module: `a_b_0` for `a.b.0.weight`."""

    def __post_init__(self) -> None:
        """Index the keys of the base by the keys of the model, and by kohya's names of modules."""
        for name in get_named_tensors(self.section.node):
            model_key = _to_model_key(name)
            self._base_keys.setdefault(model_key, []).append(name)
            if model_key.endswith(".weight"):
                kohya_name = model_key.removesuffix(".weight").replace(".", "_")
                self._base_keys_by_kohya.setdefault(kohya_name, []).append(name)

    def add_adapter(self, adapter: _Adapter) -> Change:
        """Plan the weights that an adapter changes, and return the line for the receipt.

        Low-rank factors are added to a weight; a tensor saved in full replaces one.

        Raises:
            NotFound: if a tensor has no counterpart in the base.
            UsageError: if shapes do not match, or the adapter has a larger vocabulary.
        """
        module_by_key: dict[str, str] = {}
        larger_shapes: dict[str, Sequence[int | None]] = {}
        vocabulary_sizes = adapter.list_vocabulary_sizes()
        for module, factors in adapter.factors.items():
            name = self._claim_key(adapter, module, f"{module}.weight", module_by_key)
            shape = _get_weight_shape(factors)
            has_more_rows = _has_more_rows(shape, self.section.node[name].shape)
            if has_more_rows and shape[0] in vocabulary_sizes:
                larger_shapes[name] = shape
                continue
            self._check_shapes(adapter, module, self.section.node[name], factors)
            self._added.setdefault(name, []).append(factors)
        self._refuse_unclear_order(adapter, module_by_key)
        replacing_keys: dict[str, str] = {}  # by key in the base
        for adapter_key, tensor in adapter.saved.items():
            name = self._claim_key(adapter, adapter_key, adapter_key, replacing_keys)
            old: TensorRef = self.section.node[name]
            if _has_more_rows(tensor.shape, old.shape):
                larger_shapes[name] = tensor.shape
            elif tensor.shape != old.shape or not tensor.has_content:
                raise UsageError(
                    f"{printable(adapter_key)!r} is {_describe_tensor(tensor, old)} in the adapter "
                    f"and {_describe_tensor(old, tensor)} in the base",
                    file=adapter.path,
                )
            self._replaced[name] = tensor
        if larger_shapes:
            self._refuse_larger_vocabulary(larger_shapes)
        scales = sorted({factors.scale for factors in adapter.factors.values()})
        shown = listed([f"{scale:g}" for scale in scales], most=4)
        text = f"merged {adapter.path} into {counted(len(module_by_key), 'weight')} (scale {shown})"
        if adapter.saved:
            text += f"; replaced {counted(len(adapter.saved), 'tensor')}"
        return Change("merge", text, len(module_by_key) + len(adapter.saved))

    def merge_weights(self, dropped: set[str]) -> dict[str, TensorRef]:
        """Return the new tensors by key, except `dropped` ones; tied tensors change together."""
        node, merger = self.section.node, Merger()
        factors_by_place: dict[Any, list[Factors]] = {}
        for name, factors in self._added.items():
            factors_by_place.setdefault(node[name].place, []).extend(factors)
        changing = {
            name: tensor
            for name, tensor in get_named_tensors(node).items()
            if name not in dropped and (tensor.place in factors_by_place or name in self._replaced)
        }
        refuse_dependent_tensors(self.base, {id(tensor) for tensor in changing.values()})
        merged: dict[Any, TensorRef] = {}
        new_tensors: dict[str, TensorRef] = {}
        for name, tensor in changing.items():
            replacement = self._replaced.get(name)
            has_factors = tensor.place in factors_by_place
            if replacement is not None and replacement.dtype == tensor.dtype and not has_factors:
                # Nothing to compute: the new tensor has the bytes of the adapter.
                new_tensors[name] = replace_elements(
                    tensor,
                    storage=replacement.storage,
                    offset=replacement.offset,
                    stride=replacement.stride,
                    flags=replacement.flags,
                )
                continue
            if tensor.dtype not in FLOATING or not tensor.has_content:
                raise NotRepresentable(
                    f"{printable(name)!r} is {tensor.dtype} {tensor.kind}, which cannot take "
                    "an adapter",
                    file=self.base.path,
                )
            # Tied tensors share one result, unless the adapter replaces one of them.
            identity = name if replacement is not None else tensor.place
            if identity not in merged:
                factors_to_add = factors_by_place.get(tensor.place, ())
                storage = merger.merge(tensor, replacement, factors_to_add)
                stride = row_major_strides(tensor.sizes)
                merged[identity] = replace_elements(
                    tensor, storage=storage, offset=0, stride=stride, flags=()
                )
            new_tensors[name] = merged[identity]
        return new_tensors

    def _check_shapes(
        self, adapter: _Adapter, module: str, weight: TensorRef, factors: Factors
    ) -> None:
        """Refuse factors of a module if their product does not have the shape of the weight."""
        matrices = [
            matrix for matrix in (factors.down, factors.up, factors.magnitude) if matrix is not None
        ]
        is_readable = all(matrix.dtype in FLOATING and matrix.has_content for matrix in matrices)
        product_shape = tuple(factors.shape or ())
        # A model may store the weight of a layer as (in, out).
        is_transposed = len(product_shape) == 2 and weight.shape == product_shape[::-1]
        if not is_readable or not (is_transposed or weight.shape == factors.shape):
            shapes = listed([f"{matrix.dtype} {list(matrix.shape)}" for matrix in matrices])
            raise UsageError(
                f"{printable(module)!r} consists of {shapes}, and its weight in "
                f"{self.base.path} is {weight.dtype} {list(weight.shape)}: they do not fit",
                file=adapter.path,
            )

    def _refuse_larger_vocabulary(
        self, larger_shapes: Mapping[str, Sequence[int | None]]
    ) -> NoReturn:
        """Refuse an adapter that was trained after the vocabulary of its base was extended.

        `larger_shapes` are those in the adapter, by key in the base.
        """
        rules = (
            f"--resize {shell(f'{escaped_glob(name)}={n_rows}')}"
            for name, (n_rows, *_) in larger_shapes.items()
        )
        name, shape = next(iter(larger_shapes.items()))
        raise UsageError(
            f"{printable(name)} is {list(shape)} in the adapter and "
            f"{list(self.section.node[name].shape)} in the base",
            file=self.base.path,
            hint=f"give the base the new rows first: ckptool convert {shell(self.base.path)} OUT "
            f"{' '.join(rules)}",
        )

    def _refuse_unclear_order(self, adapter: _Adapter, module_by_key: Mapping[str, str]) -> None:
        """Refuse a square weight if other weights contradict the configured order of axes.

        A square shape does not show whether it is (in, out). `module_by_key` has the modules by key
        in the base.
        """
        square_module = None
        configured: bool | None = None  # the order that another weight contradicts: (in, out)?
        for name, module in module_by_key.items():
            factors, shape = adapter.factors[module], self.section.node[name].shape
            is_transposed = factors.needs_transpose(shape)
            if is_transposed is None:  # it is square
                square_module = module
            elif len(shape) == 2 and is_transposed != factors.transposed:
                configured = factors.transposed
        if square_module is not None and configured is not None:
            order, state = ("(out, in)", "set") if configured else ("(in, out)", "not set")
            raise UsageError(
                f"{printable(square_module)!r} is square, so its shape does not show its order: "
                f"others of this adapter are {order}, but fan_in_fan_out is {state}",
                file=adapter.path,
                hint=f"{'remove' if configured else 'set'} fan_in_fan_out in the "
                "adapter_config.json next to it",
            )

    def _claim_key(
        self, adapter: _Adapter, shown: str, wanted: str, used_keys: dict[str, str]
    ) -> str:
        """Return the key in the base for the key `wanted` of the adapter, and mark it as used.

        Messages show the key as `shown`. `used_keys` has the shown key by key in the base.

        Raises:
            NotFound: if no key matches, or several do.
            UsageError: if the key is already used.
        """
        # The first list with a key decides: the later ones are less certain.
        for candidates in self._find_candidates(_to_model_key(wanted)):
            if len(candidates) > 1:
                raise NotFound(
                    f"{printable(shown)!r} is ambiguous: it could be {listed(candidates, most=3)}",
                    file=adapter.path,
                )
            if candidates:
                [name] = candidates
                if used_keys.setdefault(name, shown) != shown:
                    raise UsageError(
                        f"{printable(shown)!r} and {printable(used_keys[name])!r} both mean "
                        f"{printable(name)!r}",
                        file=adapter.path,
                    )
                return name
        raise NotFound(
            f"{printable(shown)!r} has no counterpart in {self.base.path}",
            file=adapter.path,
            hint="the adapter may belong to another model; extract a part of it with extract "
            "--include",
        )

    def _find_candidates(self, wanted: str) -> Iterator[list[str]]:
        """Yield lists of possible keys in the base for a key of the model, most certain first.

        That is the same key; for kohya's name of a module, also the end of such a name; the key
        without its first component (`unet.a.weight -> a.weight`); a key with this ending.
        """
        yield self._base_keys.get(wanted, [])
        if match := _KOHYA_PREFIX.match(wanted):
            kohya_name = wanted[match.end() :].removesuffix(".weight")
            yield self._base_keys_by_kohya.get(kohya_name, [])
            yield _match_ending(self._base_keys_by_kohya, f"_{kohya_name}")
        _, _, inner_key = wanted.partition(".")
        yield self._base_keys.get(inner_key, [])
        yield _match_ending(self._base_keys, f".{wanted}")


def _get_weight_shape(factors: Factors) -> tuple[int | None, ...]:
    """Return the shape of the weight that the factors belong to."""
    shape = tuple(factors.shape or ())
    return shape[::-1] if factors.transposed else shape


def _has_more_rows(shape: Sequence[int | None], old: Sequence[int | None]) -> bool:
    """Return True if a matrix has more rows than the old one, and the same other axes."""
    if len(shape) != len(old) or len(old) < 2:
        return False
    (n_rows, *axes), (n_old_rows, *old_axes) = shape, old
    if n_rows is None or n_old_rows is None:  # ragged
        return False
    return n_rows > n_old_rows and axes == old_axes


def _describe_tensor(tensor: TensorRef, other: TensorRef) -> str:
    """Return the shape as text, after the kind if the kinds of the two tensors differ."""
    shape = str(list(tensor.shape))
    return shape if tensor.kind == other.kind else f"{tensor.kind} {shape}"


def _match_ending(keys_by_name: Mapping[str, list[str]], end: str) -> list[str]:
    """Return the keys of all names with this ending."""
    return [key for name, keys in keys_by_name.items() if name.endswith(end) for key in keys]


def _to_model_key(name: str) -> str:
    """Return the model's own key for a key of a PeftModel.

    `base_model.model.a.base_layer.weight -> a.weight`; any other key is unchanged.
    """
    name = name.removeprefix(PEFT).replace(".base_layer.", ".")
    return re.sub(r"\.modules_to_save\.\w+(?=\.)", "", name)
