"""How a table is stored, and whether its NaNs are refused: the options that a user gives, before a scale is chosen.

The record checks its values when it is made. What depends on the table's dtype is checked later, by
`cnr_store.write.schema_choice.check_options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from cnr_store.encodings.lattice import LARGEST_SCALE, SMALLEST_SCALE
from cnr_store.errors import BadInput
from cnr_store.format.limits import MAX_FLOAT32
from cnr_store.runtime.arguments import checked_choice, checked_count, checked_number
from cnr_store.types import AffineBits, AffineSearch, EncodingName, ParamDtype

SlotBits = AffineBits | Literal["exact"]
"""How exact an optimizer slot is: as beside a table of so many bits, or every bit of it."""

_TARGETS = ("bits", "max_error", "scale")
ENCODINGS_WITH: dict[str, tuple[EncodingName, ...]] = {
    "bits": ("lattice", "affine"),
    "max_error": ("lattice",),
    "scale": ("lattice",),
    "mantissa_bits": ("float_bits",),
    "search": ("affine",),
    "param_dtype": ("affine",),
}
"""Options that only some encodings have."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How a table is stored.

    Options that contradict each other, or that the encoding does not use, are refused.

    Attributes
    ----------
    encoding
        None chooses ``lattice`` for float32 tables and exact ``float_bits`` for float16 and bfloat16 tables.
    bits
        For ``lattice``: as exact as b-bit Check-N-Run rows (2, 3, 4, 8; default 8). For ``affine``: the width.
        ``"auto"`` depends on the expected number of restores (2 bits up to 1, 3 up to 3, 4 up to 20, else 8).
    max_error, scale
        For ``lattice``, instead of ``bits``: largest absolute error of an element, or the step itself.
    expected_restores
        How often the run will be restored; used by ``bits="auto"``. A `CheckpointManager` counts restores, and uses its
        count once that is larger.
    search, param_dtype
        For ``affine``: the parameter search, and the dtype of the stored scale and zero_point.
    mantissa_bits
        For ``float_bits``: 23 is exact fp32 (default: exact for the dtype).
    slot_bits
        How exactly optimizer slots are stored: as for a table of so many bits (2, 3, 4, 8), or ``"exact"``; for all
        slots, or by name of the slot. None, and slots that are not named: the table's ``bits``, 8 if it has none.
    nonfinite
        What to do with rows that hold NaN, Inf or values beyond the code range: refuse the save, or store them as exact
        rows (``escape``).
    fill
        Value of rows that were never set or were deleted.

    Raises
    ------
    BadInput

    Examples
    --------
    >>> TableOptions(bits=4, max_error=0.01)
    Traceback (most recent call last):
    cnr_store.errors.BadInput: give one of bits, max_error and scale, found ['bits', 'max_error']
    """

    encoding: EncodingName | None = None
    bits: AffineBits | Literal["auto"] | None = None
    max_error: float | None = None
    scale: float | None = None
    expected_restores: float | None = None
    search: AffineSearch = "grid"
    param_dtype: ParamDtype = "float16"
    mantissa_bits: int | None = None
    slot_bits: SlotBits | Mapping[str, SlotBits] | None = None
    nonfinite: Literal["refuse", "escape"] = "refuse"
    fill: float = 0.0

    def __post_init__(self) -> None:
        self._check_values()
        check_used(self, (self.encoding,) if self.encoding is not None else ("lattice", "float_bits"))
        targets = [name for name in _TARGETS if getattr(self, name) is not None]
        if len(targets) > 1:
            raise BadInput(
                f"give one of bits, max_error and scale, found {targets}", expected="one of them", found=targets
            )
        if self.bits == "auto" and self.expected_restores is None:
            raise BadInput(
                'bits="auto" needs expected_restores=: how often the run will be restored; '
                "cnr_store.expected_restores(run_hours, mean_hours_between_failures) computes it from a failure rate"
            )

    def _check_values(self) -> None:
        if self.encoding is not None:
            checked_choice("encoding", self.encoding, get_args(EncodingName))
        if self.bits is not None:
            _set(self, "bits", checked_choice("bits", self.bits, (*get_args(AffineBits), "auto")))
        if self.max_error is not None:
            bounds = {"least": SMALLEST_SCALE, "most": LARGEST_SCALE / 2}
            _set(self, "max_error", checked_number("max_error", self.max_error, **bounds))
        if self.scale is not None:
            bounds = {"least": SMALLEST_SCALE, "most": LARGEST_SCALE}
            _set(self, "scale", checked_number("scale", self.scale, **bounds))
        if self.expected_restores is not None:
            _set(self, "expected_restores", checked_number("expected_restores", self.expected_restores, least=0))
        checked_choice("search", self.search, get_args(AffineSearch))
        checked_choice("param_dtype", self.param_dtype, get_args(ParamDtype))
        if self.mantissa_bits is not None:
            _set(self, "mantissa_bits", checked_count("mantissa_bits", self.mantissa_bits, least=0, most=23))
        _set(self, "slot_bits", _checked_slot_bits(self.slot_bits))
        checked_choice("nonfinite", self.nonfinite, ("refuse", "escape"))
        _set(self, "fill", checked_number("fill", self.fill, least=-MAX_FLOAT32, most=MAX_FLOAT32))

    @classmethod
    def exact(cls, *, nonfinite: Literal["refuse", "escape"] = "refuse") -> TableOptions:
        """Bit-exact tables and slots: float_bits with every mantissa bit."""
        return cls(encoding="float_bits", slot_bits="exact", nonfinite=nonfinite)


def check_used(options: TableOptions, encodings: Sequence[str]) -> None:
    """Return if one of the encodings, by name, has every option that is set.

    Raises
    ------
    BadInput
    """
    defaults = {one.name: one.default for one in fields(options)}
    given = [name for name in ENCODINGS_WITH if getattr(options, name) != defaults[name]]
    unused = [[name for name in given if encoding not in ENCODINGS_WITH[name]] for encoding in encodings]
    if all(unused):
        least = min(unused, key=len)
        encoding = encodings[unused.index(least)]
        raise BadInput(
            f"encoding {encoding!r} has no option {', '.join(least)}: leave out what it does not have, or name the "
            f"encoding that is meant ({', '.join(sorted({one for name in least for one in ENCODINGS_WITH[name]}))})",
            expected=encoding, found=least,
        )  # fmt: skip


def _checked_slot_bits(given: Any) -> Any:
    allowed = (*get_args(AffineBits), "exact")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return checked_choice("slot_bits", given, allowed)
    return {name: checked_choice(f"slot_bits of {name!r}", bits, allowed) for name, bits in given.items()}


def _set(record: Any, name: str, value: Any) -> None:
    """Set a field of a frozen record that is being made."""
    object.__setattr__(record, name, value)
