"""The network of a LoRA: what is trained of it and what is not, where it starts, in how much memory."""

import pytest
import tiny_lora_runs as runs
import torch
from trainer import config
from trainer.errors import TrainerError
from trainer.lora import families, files, models, network

CPU = torch.device("cpu")
MODULES = {"sdxl": 32, "flux": 11, "qwen_image": 16, "z_image": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def model(folders):
    return lambda family: models.get(family)(runs.base(folders, family))


def dead(module, family, names):
    return files.dead(family, names, module.config.num_layers) if family.dead else set()


def loaded(model, seed=1, numbers="f32", **options):
    options = config.Lora(**({"rank": 4, "alpha": 4, "checkpointing": False} | options))
    return network.load(model, options, numbers, CPU, seed)


def gradients(model, module):
    """Gradients of the LoRA after its up matrices got values, for one noisy latent."""
    family, random = model.family, torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in network.parameters(module).items():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    noisy = torch.randn(1, family.latent_channels, 8, 8, generator=random)
    given = runs.embeddings(family.name, random)
    ids = torch.tensor([[64, 64, 0, 0, 64, 64]]) if family.name == "sdxl" else None
    module.train().zero_grad()
    model.predict(module, noisy, torch.tensor([300.0]), [given], ids).square().mean().backward()
    return {name: it.grad for name, it in network.parameters(module).items()}


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_only_the_lora_is_trained_in_f32_and_the_base_stays_as_it_was(model, family):
    model = model(family)
    module, plain = loaded(model), model.network(torch.float32, CPU)
    names = network.targets(plain, model.family, [])
    assert len(names) == MODULES[family]
    trained = network.parameters(module)
    assert set(trained) == {f"{name}.lora_{side}.weight" for name in names for side in "AB"}
    assert {it.dtype for it in trained.values()} == {torch.float32}
    found = gradients(model, module)
    torch.optim.AdamW(trained.values(), lr=1.0).step()
    frozen = {name.replace(".base_layer", ""): it for name, it in module.named_parameters() if not it.requires_grad}
    assert all(it.grad is None for it in frozen.values())
    assert all(torch.equal(frozen[name], it) for name, it in plain.named_parameters())
    unread = dead(plain, model.family, names)
    learning = {name.rpartition(".lora_")[0] for name, it in found.items() if it is not None and it.any()}
    assert learning == set(names) - unread
    assert len(unread) == (2 if family == "qwen_image" else 0)


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_an_untrained_lora_changes_nothing_and_its_down_matrices_get_no_gradient_at_first(model, family):
    model = model(family)
    module, plain = loaded(model, alpha=8), model.network(torch.float32, CPU)
    random = torch.Generator().manual_seed(2)
    given = [runs.embeddings(family, random)]
    inputs = (torch.randn(1, model.family.latent_channels, 8, 16, generator=random), torch.tensor([500.0]), given)
    ids = torch.tensor([[64, 128, 0, 0, 64, 128]]) if family == "sdxl" else None
    found = model.predict(module, *inputs, ids)
    assert torch.equal(found, model.predict(plain, *inputs, ids))
    found.square().mean().backward()
    for name, parameter in network.parameters(module).items():
        moving = parameter.grad is not None and parameter.grad.any()
        assert not (moving and "lora_A" in name), name


def test_initial_weights_follow_from_the_seed_alone(model):
    model = model("z_image")
    one = network.parameters(loaded(model))
    torch.randn(1000)
    other = network.parameters(loaded(model))
    assert all(torch.equal(one[name], other[name]) for name in one)
    another = network.parameters(loaded(model, seed=2))
    assert all(not torch.equal(one[name], another[name]) for name in one if "lora_A" in name)
    down = torch.cat([it.flatten() for name, it in one.items() if "lora_A" in name])
    assert down.std().item() == pytest.approx(1 / 4, rel=0.05)
    assert not any(it.any() for name, it in one.items() if "lora_B" in name)


def test_targets_are_names_ends_of_names_patterns_and_presets(model):
    flux = model("flux")
    module = flux.network(torch.float32, CPU)

    def found(*wanted):
        return network.targets(module, flux.family, wanted)

    assert found("transformer_blocks.0.attn.to_q") == ["transformer_blocks.0.attn.to_q"]
    assert found("to_q") == ["single_transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q"]
    assert found("single_*.attn.to_[qk]", "x_embedder") == [
        *("single_transformer_blocks.0.attn.to_k", "single_transformer_blocks.0.attn.to_q", "x_embedder")
    ]
    assert found("attn") == found()
    assert set(found("attn-mlp")) - set(found("attn")) == {
        *(f"transformer_blocks.0.{it}" for it in ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj")),
        *("transformer_blocks.0.ff_context.net.2", "single_transformer_blocks.0.proj_mlp"),
        "single_transformer_blocks.0.proj_out",  # not the network's own last layer of that name
    }
    attached = network.parameters(loaded(flux, targets=["to_q"]))
    assert {name.rpartition(".lora_")[0] for name in attached} == set(found("to_q"))


def test_unknown_targets_are_told_all_at_once_with_near_names(model):
    with pytest.raises(TrainerError, match=r"Z-Image base matches 'attn.to_k' \(near are attention.to_k.*'layer\.\*'"):
        loaded(model("z_image"), targets=["attn.to_k", "to_q", "layer.*"])


@pytest.mark.parametrize(
    ("family", "modules", "unread"), [("flux", 266, 0), ("qwen_image", 480, 2), ("z_image", 136, 0)]
)
def test_the_real_networks_have_as_many_modules_as_are_known(family, modules, unread):
    import diffusers

    family = families.get(family)
    with torch.device("meta"):
        module = getattr(diffusers, family.network)()  # the defaults of its class are the published sizes
    names = network.targets(module, family, [])
    assert (len(names), len(dead(module, family, names))) == (modules, unread)
    assert 2e-9 * sum(it.numel() for it in module.parameters()) == pytest.approx(family.gigabytes, abs=0.02)


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_a_base_in_bf16_keeps_its_numbers_and_gradients_are_f32(model, family):
    model = model(family)
    module = loaded(model, numbers="bf16")
    found = [it for it in gradients(model, module).values() if it is not None]
    assert {it.dtype for it in found} == {torch.float32}
    frozen = {it.dtype for it in module.parameters() if not it.requires_grad}
    assert frozen == {it.dtype for it in model.network(torch.bfloat16, CPU).parameters()}
    whole = [it for it in gradients(model, loaded(model)).values() if it is not None]
    assert all(
        torch.linalg.vector_norm(a - b) < 0.2 * torch.linalg.vector_norm(b) + 1e-6
        for a, b in zip(found, whole, strict=True)
    )


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_blocks_computed_twice_or_waiting_in_main_memory_give_the_same_gradients(model, family):
    model = model(family)
    plain = gradients(model, loaded(model))
    for options in ({"checkpointing": True}, {"checkpointing": True, "offload": True}, {"offload": True}):
        module = loaded(model, **options)
        assert module.is_gradient_checkpointing == options.get("checkpointing", False)
        found = gradients(model, module)
        assert all(torch.equal(found[name], it) for name, it in plain.items() if it is not None), options
        waiting = [it for it in module.parameters() if it.device.type == "meta"]
        assert bool(waiting) == ("offload" in options)
        assert not any(it.requires_grad for it in waiting)
        numbers = [sum(it.numel() for it in some) for some in (waiting, module.parameters())]
        assert "offload" not in options or numbers[0] > 0.2 * numbers[1]


def test_the_size_of_a_network_is_known_without_loading_it(model):
    for family in runs.FAMILIES:
        whole = model(family)
        module = whole.network(torch.float32, CPU)
        assert network.count_parameters(whole) == sum(it.numel() for it in module.parameters())


def test_what_the_base_is_kept_in_follows_from_the_device(model, monkeypatch):
    model, gpu = model("z_image"), torch.device("cuda", 0)

    def found(wanted="auto", device=gpu, **more):
        return network.precision(model, config.Lora(base_precision=wanted, **more), device)

    assert found(device=CPU) == "f32"
    assert found("bf16", CPU) == "bf16"
    with pytest.raises(TrainerError, match="are for NVIDIA GPUs"):
        found("nf4", CPU)
    memory = type("Properties", (), {"total_memory": 10**6})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(network, "find_spec", lambda name: None)
    size = 2 * network.count_parameters(model)
    memory.total_memory = 2 * size
    assert found() == "bf16"
    memory.total_memory = size
    assert found(offload=True) == "bf16"  # it needs no room on the GPU
    with pytest.raises(TrainerError, match="pip install bitsandbytes"):
        found()
    monkeypatch.setattr(network, "find_spec", lambda name: name)
    assert found() == "nf4"
    with pytest.raises(TrainerError, match=r"lora\.offload is for dense bases"):
        found("nf4", offload=True)


def test_4_bits_are_nf4_scaled_twice_and_computed_with_in_bf16(monkeypatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.48.0")  # of bitsandbytes, which takes a GPU
    made = network._quantization("nf4")
    assert made.load_in_4bit
    assert made.bnb_4bit_use_double_quant
    assert (made.bnb_4bit_quant_type, made.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    assert [network._quantization(it) for it in ("f32", "bf16", "f16")] == [None] * 3


def test_compiled_blocks_keep_the_names_of_parameters_and_can_be_had_plain_again(model):
    module = loaded(model("z_image"))
    names = list(network.parameters(module))
    network.use_compiled(module, True)
    compiled = [it for it in module.modules() if it._compiled_call_impl is not None]
    assert {type(it).__name__ for it in compiled} == set(module._repeated_blocks)
    assert list(network.parameters(module)) == names
    network.use_compiled(module, False)
    assert not any(it._compiled_call_impl for it in module.modules())
