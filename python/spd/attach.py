"""A run's components inside of a PyTorch model: importances of what it reads, and masked passes."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from . import importance
from .components import IMPORTANCE, SiteComponents, unknown_site
from .errors import AttachError

if TYPE_CHECKING:
    from .run import Run

PRE_IDENTITY = ".pre_identity"
"""Ends the name of the identity matrix before a layer."""

ALIASES = {"embed_out": "lm_head"}
"""Names of layers in newer versions of transformers."""

OTHER_WEIGHTS = 1e-6
"""Part of a tensor's largest number that a model's may be off: it is read from files as the run's were."""


class Parts:
    """A model with the components of a run inside, in a `with` statement.

    A pass without masks is the model's own, and `importances` are of its input. After `ablate`, `keep` or `mask`, passes go through the
    components with these masks, until `clear`.
    """

    def __init__(self, run: "Run", model: nn.Module, *, check_weights: bool = True) -> None:
        self.run, self.model = run, model
        self._kinds: dict[str, str] = {}
        self._modules = {site: self._module(site) for site in run.components}
        said, target = run.config["importance"], run.config["target"]
        if said["kind"] not in importance.FUNCTIONS:
            raise AttachError(
                f"{run.path}: has importances by {said['kind']}, which this version does not know; install a newer spd-launch"
            )
        self._chunks = importance.chunks(said, list(self._modules), target)
        self._taps = {name for chunk in self._chunks for name in chunk.taps}
        self._blocks = importance.BLOCKS[target["kind"]] if self._taps else None
        if check_weights:
            self._check_weights()
        device = next(iter(self._modules.values())).weight.device
        self.components: dict[str, SiteComponents[Tensor]] = {}
        for site in run.components:
            of = run.components[site]
            v, u = (torch.tensor(array, device=device) for array in (of.V, of.U))
            self.components[site] = SiteComponents(site, v, u, {})
        self.importance = {
            name.removeprefix(IMPORTANCE): torch.tensor(array, device=device)
            for name, array in run.tensors.items()
            if name.startswith(IMPORTANCE)
        }
        """The tensors of the importance functions, which may be changed or asked for gradients, as those of `components`."""
        self._hooks: list[Any] = []
        self._inputs: dict[str, Tensor] = {}
        self._found_taps: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None
        self._logits: dict[str, Tensor] | None = None
        self._masks: dict[str, tuple[Tensor, Tensor]] | None = None

    # Importances.

    @property
    def logits(self) -> dict[str, Tensor]:
        """Importances of the last pass without masks before they are brought between 0 and 1: [batch, position, C] by site."""
        if self._logits is None:
            if len(self._inputs) < len(self._modules):
                raise AttachError("importances are of a pass without masks, and there was none yet; call the model first")
            sites = [
                importance.SeenSite(site, self._inputs[site], self.components[site].V, self._kinds[site] == "Embedding")
                for site in self._modules
            ]
            seen = importance.Seen(sites, self._found_taps, self._chunks, self._tokens)
            self._logits = importance.logits(self.run.config["importance"], self.importance, seen)
        return self._logits

    @property
    def importances(self) -> dict[str, Tensor]:
        """The causal importances of the last pass without masks: [batch, position, C] by site.

        A run with `sampling = "binomial"` adds noise to logits in training, which these are without.
        """
        sigmoid = self.run.config["importance"]["sigmoid"]
        return {site: importance.importance(sigmoid, z) for site, z in self.logits.items()}

    # Masks.

    def ablate(self, *names: str) -> None:
        """Passes from now on are without these components: `SITE:NUMBER`, or `SITE` for all of a site.

        The matrix of a site is then its weight less these components: what they leave over stays. Other sites stay as they are.
        """
        masks = {site: self._zeros_at(site, gone, inside=1.0) for site, gone in self._named(names).items()}
        self.mask(masks, delta=1.0)

    def keep(self, *names: str, delta: float = 0.0) -> None:
        """Passes from now on have these components alone, `SITE:NUMBER` or `SITE` for all of a site: all others of all sites are gone.

        `delta` is the part that stays of what the components of a site leave over.
        """
        named = self._named(names)
        self.mask({site: self._zeros_at(site, named.get(site, []), inside=0.0) for site in self._modules}, delta=delta)

    def mask(self, masks: Mapping[str, Any], delta: float | Tensor | Mapping[str, Any] = 0.0) -> None:
        """Passes from now on have these masks of components by site: anything that broadcasts to [batch, position, C].

        `delta` is the mask of what the components of a site leave over: a number, or [batch, position], or these by site. Sites without
        a mask stay as they are. Gradients reach masks, components and the model.
        """
        made: dict[str, tuple[Tensor, Tensor]] = {}
        for site, given in masks.items():
            self._know(site)
            of = self.components[site]
            mask = torch.as_tensor(given, device=of.V.device, dtype=of.V.dtype)
            if mask.ndim > 0 and mask.shape[-1] not in (1, len(of)):
                raise AttachError(f"mask of {site}: expected [.., {len(of)}], a column for each component, found {list(mask.shape)}")
            left = delta.get(site, 0.0) if isinstance(delta, Mapping) else delta
            made[site] = (mask, torch.as_tensor(left, device=of.V.device, dtype=of.V.dtype))
        if isinstance(delta, Mapping):
            for site in delta:
                if site not in masks:
                    raise AttachError(f"delta of {site}: expected a mask of that site beside it, found none")
        self._masks = made

    def clear(self) -> None:
        """Passes from now on are the model's own."""
        self._masks = None

    def _named(self, names: Iterable[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name in names:
            if name in self._modules:
                found[name] = list(range(len(self.components[name])))
            else:
                site, index = self.run.components.component(name)
                found.setdefault(site, []).append(index)
        return found

    def _zeros_at(self, site: str, named: list[int], inside: float) -> Tensor:
        """A mask that is `inside` but at some components, and the other of 0 and 1 there."""
        of = self.components[site]
        mask = torch.full((len(of),), inside, device=of.V.device, dtype=of.V.dtype)
        mask[named] = 1 - inside
        return mask

    def _know(self, site: str) -> None:
        if site not in self._modules:
            raise unknown_site(str(self.run.path), site, list(self._modules))

    # Hooks.

    def __enter__(self) -> Self:
        self._hooks.append(self.model.register_forward_pre_hook(self._begin, with_kwargs=True))
        # Identity matrices come first: their layer sees what they leave.
        for site in sorted(self._modules, key=lambda site: not site.endswith(PRE_IDENTITY)):
            module = self._modules[site]
            if site.endswith(PRE_IDENTITY):
                self._hooks.append(module.register_forward_pre_hook(self._before(site)))
            else:
                self._hooks.append(module.register_forward_hook(self._instead(site)))
        for name in sorted(self._taps):
            self._tap(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._masks is not None:
            return
        self._logits = None
        self._inputs.clear()
        self._found_taps.clear()
        given = args[0] if args else kwargs.get("input_ids")
        self._tokens = given if isinstance(given, Tensor) and not given.is_floating_point() else None

    def _see(self, site: str, x: Tensor) -> Tensor:
        """The input of a site in the precision of its components."""
        x = x if self._kinds[site] == "Embedding" else x.to(self.components[site].V.dtype)
        if self._masks is None:
            self._inputs[site] = x
        return x

    def _before(self, site: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            x = self._see(site, args[0])
            if self._masks is None or site not in self._masks:
                return None
            return (self._masked(site, x, x).to(args[0].dtype), *args[1:])

        return hook

    def _instead(self, site: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            x = self._see(site, args[0])
            if self._masks is None or site not in self._masks:
                return None
            bias = getattr(module, "bias", None)
            whole = output.to(self.components[site].U.dtype)
            masked = self._masked(site, x, whole) if bias is None else self._masked(site, x, whole - bias) + bias
            return masked.to(output.dtype)

        return hook

    def _masked(self, site: str, x: Tensor, whole: Tensor) -> Tensor:
        """`((x V) m) U + d (x W - x V U)`, where `whole` is `x W`."""
        assert self._masks is not None
        mask, delta = self._masks[site]
        of = self.components[site]
        acts = of.V[x] if self._kinds[site] == "Embedding" else x @ of.V
        rows = delta[..., None] if delta.ndim else delta
        try:
            masked = (acts * (mask - rows)) @ of.U
            return masked + rows * whole
        except RuntimeError as error:
            expected = f"expected what broadcasts to {list(acts.shape)}"
            raise AttachError(f"mask of {site}: {expected}, found {list(mask.shape)} and delta {list(delta.shape)}") from error

    def _tap(self, name: str) -> None:
        """Records a value between sites in passes without masks."""
        assert self._blocks is not None
        kind, number = name.split(".")
        block = self._named_module(f"{self._blocks.path}.{number}")

        def keep(x: Tensor) -> None:
            if self._masks is None:
                self._found_taps[name] = x.to(torch.float32)

        def into(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(args[0] if args else kwargs["hidden_states"])

        def out_of(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            keep(output[0] if isinstance(output, tuple) else output)

        if kind == "resid_post":
            self._hooks.append(block.register_forward_hook(out_of))
        elif kind == "resid_pre":
            self._hooks.append(block.register_forward_pre_hook(into, with_kwargs=True))
        elif kind == "resid_mid":
            entered: list[Tensor] = []

            def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                entered[:] = [args[0] if args else kwargs["hidden_states"]]

            def attended(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                keep(entered[0] + output)

            layer = self._named_module(f"{self._blocks.path}.{number}.{self._blocks.attn_out}")
            self._hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(attended))
        else:
            layer = self._named_module(f"{self._blocks.path}.{number}.{getattr(self._blocks, kind)}")
            self._hooks.append(layer.register_forward_pre_hook(into, with_kwargs=True))

    # What fits.

    def _named_module(self, path: str) -> nn.Module:
        names = dict(self.model.named_modules(remove_duplicate=False))
        found: nn.Module | None = names.get(path, names.get(ALIASES.get(path, path)))
        if found is None:
            near = get_close_matches(path, names, 1)
            hint = f"did you mean a model that has {near[0]}?" if near else f"its layers are {', '.join(list(names)[1:7])}, ..."
            raise AttachError(f"{type(self.model).__name__} has no layer {path}, a site of {self.run.path}; {hint}")
        return found

    def _module(self, site: str) -> Any:
        module = self._named_module(site.removesuffix(PRE_IDENTITY))
        kind = self._kinds[site] = type(module).__name__
        weight = getattr(module, "weight", None)
        layouts: dict[str, Callable[[Tensor], Tensor]] = {
            "Linear": lambda weight: weight.T,
            "Conv1D": lambda weight: weight,
            "Embedding": lambda weight: weight,
        }
        if isinstance(module, nn.Linear):
            kind = self._kinds[site] = "Linear"
        elif isinstance(module, nn.Embedding):
            kind = self._kinds[site] = "Embedding"
        if kind not in layouts or weight is None or weight.ndim != 2:
            raise AttachError(f"layer {site}: expected a linear layer or an embedding, found {type(module).__name__}")
        d_in, d_out = layouts[kind](weight).shape
        of = self.run.components[site]
        wanted = (of.V.shape[0], of.U.shape[1])
        if (d_in, d_in if site.endswith(PRE_IDENTITY) else d_out) != wanted:
            raise AttachError(f"layer {site}: expected {wanted[0]} inputs and {wanted[1]} outputs, found {d_in} and {d_out}")
        return module

    def _check_weights(self) -> None:
        """Refuses a model with other numbers than the run's target: its importances would mean nothing."""
        target, state = self.run.target, self.model.state_dict()
        of_sites = {f"{site.removesuffix(PRE_IDENTITY)}.weight" for site in self._modules}
        is_halved = self.run.config["target"].get("dtype") == "bf16"
        for name in target:
            layer, _, part = name.rpartition(".")
            own = state.get(name, state.get(f"{ALIASES.get(layer, layer)}.{part}"))
            if own is None and name not in of_sites:
                continue
            expected = torch.from_numpy(np.ascontiguousarray(target[name]))
            if own is None or own.shape != expected.shape:
                found = "none" if own is None else list(own.shape)
                raise AttachError(f"weight {name}: expected {list(expected.shape)}, found {found}")
            own = own.detach().cpu()
            own = (own.to(torch.bfloat16) if is_halved else own).to(expected.dtype)
            off = (own - expected).abs().max().item() if own.numel() else 0.0
            if not off <= OTHER_WEIGHTS * max(expected.abs().max().item(), 1e-30):
                raise AttachError(
                    f"weight {name}: expected the numbers of the run's target, found others, {off:.1e} off; load what the run was made of "
                    "in float32, or pass check_weights=False"
                )
