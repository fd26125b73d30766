"""The text of a kernel: the function MLX makes of a body of source, and the C++ the emulator compiles in its place."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .compiler import EMULATOR

METAL_KERNEL = mx.fast.metal_kernel
"""MLX's own, whatever `install` puts in its place."""

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}
_THREE = "emu::three(emu_lane->{})".format
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "emu_lane->full_simdgroups * 8"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "emu_lane->full_simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", _THREE("full_group_size")),
    "grid_origin": ("uint3", "uint3(0)"),
    "grid_size": ("uint3", _THREE("grid")),
    "quadgroup_index_in_threadgroup": ("uint", "emu_lane->index_in_group / 4"),
    "quadgroups_per_threadgroup": ("uint", "emu_lane->simdgroups * 8"),
    "simdgroup_index_in_threadgroup": ("uint", "emu_lane->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "emu_lane->simdgroups"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_quadgroup": ("uint", "emu_lane->index_in_group % 4"),
    "thread_index_in_simdgroup": ("uint", "emu_lane->index_in_simdgroup"),
    "thread_index_in_threadgroup": ("uint", "emu_lane->index_in_group"),
    "thread_position_in_grid": ("uint3", _THREE("position_in_grid")),
    "thread_position_in_threadgroup": ("uint3", _THREE("position_in_group")),
    "threadgroup_position_in_grid": ("uint3", _THREE("group")),
    "threadgroups_per_grid": ("uint3", _THREE("groups")),
    "threads_per_grid": ("uint3", _THREE("grid")),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", _THREE("group_size")),
}
"""Attributes of the Metal Shading Language that MLX offers, with type and value for one lane. One is a parameter when
its name stands anywhere in the source."""
SMALL = 8
"""MLX puts inputs of fewer elements than this in the constant address space."""

Template = Sequence[tuple[str, Any]]
Role = Literal["input", "shape", "strides", "ndim", "output"]


@dataclass(frozen=True)
class Slot:
    """One buffer of the generated function, in its order."""

    role: Role
    name: str
    """Of the input or output it belongs to."""
    parameter: str
    pointer: str
    """C++ type of the pointee."""
    space: str
    reference: bool


@dataclass(frozen=True)
class Text:
    """A kernel for one set of types and template values."""

    name: str
    function: str
    """The name MLX gives it, with all types and template values."""
    header: str
    source: str
    slots: tuple[Slot, ...]
    attributes: tuple[str, ...]
    template: tuple[tuple[str, Any], ...]

    @property
    def metal(self) -> str:
        """What MLX hands to Metal's compiler after its own utilities."""
        text = f"{self.header}{self._signature(self.function)}{self.source}\n}}\n"
        if not self.template:
            return text
        instance = f"{self.function}{self._values()}"
        return f'{text}\ntemplate [[host_name("{self.function}")]] [[kernel]] decltype({instance}) {instance};\n'

    def cpp(self, spaces: bool = False) -> str:
        """The translation unit clang compiles; `spaces`: for the pass that only checks address spaces."""
        rewrite = Rewriter(spaces)
        return "\n".join(
            (
                "#include <metal_stdlib>",
                "using namespace metal;",
                f'#line 1 "{self.name} (header)"',
                rewrite(self.header),
                f'#line 1 "{self.name} (signature)"',
                f'{self._signature("emu_kernel")}\n#line 1 "{self.name}"',
                rewrite(self.source),
                "}",
                f'#line 1 "{EMULATOR}"',
                'extern "C" const char __ehdr_start;',
                'extern "C" const char* emu_base() { return &__ehdr_start; }',
                f'extern "C" void emu_entry(void** buffers) {{ emu_kernel{self._values()}({self._call(spaces)}); }}',
                "",
            )
        )

    def _values(self) -> str:
        return f"<{', '.join(_value(value) for _, value in self.template)}>" if self.template else ""

    def _signature(self, function: str) -> str:
        kinds = ", ".join(f"{_kind(value)} {name}" for name, value in self.template)
        parameters = [slot.parameter for slot in self.slots]
        parameters += [f"  {ATTRIBUTES[name][0]} {name} [[{name}]]" for name in self.attributes]
        declared = f"template <{kinds}>\n" if kinds else ""
        return f"{declared}[[kernel]] void {function}(\n" + ",\n".join(parameters) + ") {\n"

    def _call(self, spaces: bool) -> str:
        values = [
            f"{'*' * slot.reference}({slot.space * spaces} {slot.pointer}*)buffers[{index}]"
            for index, slot in enumerate(self.slots)
        ]
        return ", ".join(values + [ATTRIBUTES[name][1] for name in self.attributes])


def _kind(value: Any) -> str:
    return "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"


def _value(value: Any) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))


def generate(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.Dtype, int, int]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Template | None,
    atomic: bool,
) -> Text:
    """The function for inputs of (name, dtype, dimensions, size) and outputs of (name, dtype)."""
    slots: list[Slot] = []

    def add(role: Role, of: str, name: str, pointer: str, space: str, reference: bool) -> None:
        mark = "&" if reference else "*"
        text = pointer.replace("const ", "", 1)
        const = "const " if pointer != text else ""
        parameter = f"  {const}{space} {text}{mark} {name} [[buffer({len(slots)})]]"
        slots.append(Slot(role, of, parameter, pointer, space, reference))

    for of, dtype, ndim, size in inputs:
        add("input", of, of, f"const {TYPES[dtype]}", "constant" if size < SMALL else "device", ndim == 0)
        extras: tuple[tuple[Role, str], ...] = (("shape", "int"), ("strides", "int64_t"), ("ndim", "int"))
        for role, kind in extras:
            if ndim and f"{of}_{role}" in source:
                add(role, of, f"{of}_{role}", f"const {kind}", "constant", role == "ndim")
    for of, dtype in outputs:
        add("output", of, of, f"atomic<{TYPES[dtype]}>" if atomic else TYPES[dtype], "device", False)
    attributes = tuple(attribute for attribute in ATTRIBUTES if attribute in source)
    function = _function_name(name, template or (), inputs, outputs)
    return Text(name, function, header, source, tuple(slots), attributes, tuple(template or ()))


def _function_name(
    name: str,
    template: Template,
    inputs: Sequence[tuple[str, mx.Dtype, int, int]],
    outputs: Sequence[tuple[str, mx.Dtype]],
) -> str:
    values = [_value(value) for _, value in template]
    parts = [name, *(["_" + "_".join(values).replace("-", "_")] if values else [])]
    for _, dtype, ndim, size in inputs:
        parts.append(TYPES[dtype] + ("s" if ndim == 0 else "c" if size < SMALL else ""))
    return "custom_kernel_" + "_".join(parts + [TYPES[dtype] for _, dtype in outputs])


class Rewriter:
    """What macros cannot say: variables of a threadgroup, literals of half, vec<T, n>(...) and names of such types."""

    VARIABLE = re.compile(
        r"\bthreadgroup\s+(?P<type>(?:alignas\s*\([^)]*\)\s*)?[A-Za-z_][\w:]*(?:\s*<[^;{}()]*?>)?)\s+"
        r"(?P<names>[A-Za-z_]\w*(?:\s*\[[^;{}]*?\])*(?:\s*,\s*[A-Za-z_]\w*(?:\s*\[[^;{}]*?\])*)*)\s*;"
    )
    HALF = re.compile(r"(?<![\w.])(\d+\.\d*|\.\d+|\d+)h\b")
    VECTOR = re.compile(r"(?<![\w:])(?:metal::)?vec\s*<\s*([\w:]+)\s*,\s*(\w+)\s*>\s*\(")
    ALIAS = re.compile(
        r"\busing\s+(\w+)\s*=\s*(?:metal::)?(?:vec\s*<|u?(?:char|short|int|long)[234]|b?(?:float|half)[234])"
    )

    def __init__(self, spaces: bool) -> None:
        self.spaces = spaces
        self.variables = 0
        self.aliases: set[str] = set()

    def __call__(self, source: str) -> str:
        source = self.HALF.sub(lambda m: f"half({m[1] if '.' in m[1] else m[1] + '.'}f)", source)
        source = self.VECTOR.sub(r"emu::make<metal::vec<\1, \2>>(", source)
        self.aliases |= set(self.ALIAS.findall(source))
        for alias in self.aliases:
            source = re.sub(rf"(?<![\w:]){alias}\s*\(", f"emu::make<{alias}>(", source)
        return self.VARIABLE.sub(self._declare, source)

    def _declare(self, found: re.Match[str]) -> str:
        kind = re.sub(r"alignas\s*\([^)]*\)\s*", "", found["type"])
        declared = []
        for variable in re.split(r",(?![^\[]*\])", found["names"]):
            name, dimensions = re.fullmatch(r"\s*(\w+)\s*(.*?)\s*", variable, re.DOTALL).groups()  # type: ignore[union-attr]
            if self.spaces:
                declared.append(f"extern threadgroup {kind} {name}{dimensions};")
            else:
                made = f"emu_variable_{self.variables}"
                declared.append(f"typedef {kind} {made}{dimensions};")
                declared.append(f'auto& {name} = *emu::shared<{made}>({self.variables}, "{name}");')
            self.variables += 1
        # A declaration over several lines keeps the numbers of the lines after it.
        return " ".join(declared) + "\n" * (found[0].count("\n") - "".join(declared).count("\n"))


def mlx_text(kernel: dict[str, Any], arrays: Sequence[mx.array], scalars: Sequence[Any], call: dict[str, Any]) -> str:
    """What MLX itself generates for a kernel, without running it: `kernel` and `call` are keyword arguments of
    mx.fast.metal_kernel and of what it returns; the inputs are `arrays` followed by `scalars`."""
    made: Callable[..., Any] = METAL_KERNEL(**kernel)  # type: ignore[assignment]

    def function(*arrays: mx.array) -> Any:
        return made(inputs=[*arrays, *scalars], **call)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), function, *arrays)
        exported = path.read_bytes()
    _, end = _string(exported, exported.index(b"custom_kernel_") - 8)
    return _string(exported, end)[0]


def _string(exported: bytes, at: int) -> tuple[str, int]:
    """A string of an exported function: its length in 8 bytes, then its text. Also where it ends."""
    end = at + 8 + int.from_bytes(exported[at : at + 8], "little")
    return exported[at + 8 : end].decode(), end
