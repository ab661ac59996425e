"""The parameters and buffers of a replica's modules by name, and a cheap look whether the modules still hold them.

A step looks three times (`training/loop.py`), so a look compares objects and no values. A module keeps its tensors and
submodules in three dicts. These are compared with copies of them: equality of dicts begins with the identity of what
they hold, in C. Shapes, dtypes and devices, which another `.data` changes, take ten times as long: each step looks at
those of `FORMS` tensors, in turn. `model.half()` changes all of them, so it shows in the next step; where a single one
of a large model has another form, torch refuses its gradient, and then all are looked at.

A buffer that is assigned anew (`self.mean = 0.9 * self.mean + 0.1 * mean`) is followed: its value is copied into the
listed tensor, and that tensor is put back. So a replica holds the same buffers from its beginning to its end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from farandole.errors import UsageError

_Form = tuple[torch.Size, torch.dtype, torch.device]
_FORM = operator.attrgetter("shape", "dtype", "device")
FORMS = 32


class TensorListing:
    """The tensors of `modules`, listed now.

    Attributes:
        parameters, buffers: by full name; a tensor that several modules share goes by its first name.
        paths: for each module of `modules` all paths of its `state_dict()` that are parameters or buffers.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.paths: dict[str, dict[str, torch.Tensor]] = {}
        seen: set[int] = set()
        for name, module in modules.items():
            self.paths[name] = dict(module.named_parameters(remove_duplicate=False))
            for path, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters[f"{name}.{path}"] = parameter
        for name, module in modules.items():
            self.paths[name] |= module.named_buffers(remove_duplicate=False)
            for path, buffer in module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    self.buffers[f"{name}.{path}"] = buffer
        inner = {id(each): each for module in modules.values() for each in module.modules()}
        self._look_at([vars(each) for each in inner.values()])

    def _look_at(self, owners: Iterable[Mapping[str, Any]]) -> None:
        dicts = [owner.get(kind) for owner in owners for kind in ("_parameters", "_buffers", "_modules")]
        known = [each for each in dicts if isinstance(each, dict)]  # those of torch.jit are none
        self._dicts: list[dict[str, Any]] = known
        self._copies = [dict(each) for each in known]
        listed = {id(buffer): name for name, buffer in self.buffers.items()}
        self._slots = [(each, key, value) for each in known for key, value in each.items() if id(value) in listed]
        self._names = [listed[id(buffer)] for _, _, buffer in self._slots]
        self._owners = [owner for owner, _, _ in self._slots]
        self._keys = [key for _, key, _ in self._slots]
        self._listed = [buffer for _, _, buffer in self._slots]
        self._single = [
            (each, key, value)
            for each in known
            for key, value in each.items()
            if isinstance(value, torch.nn.Parameter) and value.numel() <= 1
        ]
        self._tensors = [*self.parameters.values(), *self.buffers.values()]
        self._forms = [_FORM(tensor) for tensor in self._tensors]
        self._looks = 0

    def adopt(self) -> None:
        """Copy the values of buffers that were assigned anew into the listed tensors, and put those back.

        Raises:
            UsageError: one has another shape, dtype or device, or is shared and was assigned in one place of several.
        """
        if all(map(operator.is_, map(dict.get, self._owners, self._keys), self._listed)):
            return
        for place, (owner, key, buffer) in enumerate(self._slots):
            value = owner.get(key)
            if value is buffer or value is None:  # one that is gone is a difference of names
                continue
            name = self._names[place]
            if self._names.count(name) > 1:
                raise UsageError(
                    f"buffer {name} is in several modules and was assigned anew in one of them; "
                    f"change it in place (buffer.copy_(value))"
                )
            if not isinstance(value, torch.Tensor) or _FORM(value) != _FORM(buffer):
                raise UsageError(_changed("buffer", name, _FORM(buffer), value))
            with torch.no_grad():
                buffer.copy_(value)
            owner[key] = buffer

    def holds(self) -> bool:
        """True if the modules still hold the listed tensors, each under its name. `adopt` comes before it."""
        try:
            same = self._dicts == self._copies
        except Exception:  # noqa: BLE001  a tensor in another one's place: as a truth value torch refuses what `==` gives
            return False
        return same and all(
            owner.get(key) is tensor for owner, key, tensor in self._single
        )  # `==` may be true of these

    def check_forms(self, *, some: bool = False) -> None:
        """Compare shapes, dtypes and devices with those of the beginning. `some`: of `FORMS` tensors, in turn.

        Raises:
            UsageError: names the first tensor that differs.
        """
        self._looks += 1
        every = -(-len(self._tensors) // FORMS) if some else 1
        part = slice(self._looks % every, None, every)
        if list(map(_FORM, self._tensors[part])) == self._forms[part]:
            return
        names = [("parameter", name) for name in self.parameters] + [("buffer", name) for name in self.buffers]
        for (kind, name), tensor, form in zip(names, self._tensors, self._forms, strict=True):
            if _FORM(tensor) != form:
                raise UsageError(_changed(kind, name, form, tensor))

    def follow(self, modules: Mapping[str, torch.nn.Module]) -> TensorListing:
        """The listing of the same modules where some tensors were replaced by others of the same name and form.

        Raises:
            UsageError: a tensor came, is gone, or has another shape, dtype or device.
        """
        now = TensorListing(modules)
        _compare_names("parameter", self.parameters, now.parameters)
        _compare_names("buffer", self.buffers, now.buffers)
        for kind, then, new in (("parameter", self.parameters, now.parameters), ("buffer", self.buffers, now.buffers)):
            for name, tensor in then.items():
                if _FORM(tensor) != _FORM(new[name]):
                    raise UsageError(_changed(kind, name, _FORM(tensor), new[name]))
        for place, (owner, key, buffer) in enumerate(now._slots):
            listed = self.buffers[now._names[place]]
            if buffer is not listed:
                with torch.no_grad():
                    listed.copy_(buffer)
                owner[key] = listed
        return TensorListing(modules)


def _compare_names(kind: str, then: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
    gone = [name for name in then if name not in now]
    new = [name for name in now if name not in then]
    if not gone and not new:
        return
    parts = [f"{kind} {names[0]}{_more(names)} {what}" for names, what in ((gone, "is gone"), (new, "is new")) if names]
    shared = [name for name, tensor in now.items() for old in gone if tensor is then[old]]
    tied = f"; {gone[0]} is {shared[0]} now" if gone and shared else ""
    raise UsageError(f"{' and '.join(parts)} since run.replicate{tied}; {REMEDY}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _changed(kind: str, name: str, then: _Form, now: Any) -> str:
    new = _words(_FORM(now)) if isinstance(now, torch.Tensor) else f"a {type(now).__name__}"
    return f"{kind} {name} was {_words(then)} when it was replicated and is {new} now; {REMEDY}"


def _words(form: _Form) -> str:
    shape, dtype, device = form
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


REMEDY = (
    "a worker that joins or resumes begins with the model as the script makes it, so change a model's form before "
    "run.replicate (for an export, convert a copy)"
)
