import json
import shutil

import pytest
import tiny_models
import tiny_pipelines
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel
from diffusers import ZImageTransformer2DModel as ZImageTransformer
from diffusers.models.attention_processor import AttnProcessor
from peft import LoraConfig
from trainer.errors import TrainerError
from trainer.lora import demo_base, families, models
from trainer.lora.models import base
from trainer.lora.objective import Flow
from transformers import Qwen2Tokenizer

CPU = torch.device("cpu")
FAMILIES = families.names()
SHORT, LONG = "a cat", "a photograph of an old lighthouse above a very stormy sea, seen from far away at night"
every_family = pytest.mark.parametrize("family", FAMILIES)
every_flow = pytest.mark.parametrize("family", [it for it in FAMILIES if families.get(it).objective == "flow"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    return {family: tiny_pipelines.save(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def pipelines(folders):
    loaded = {family: DiffusionPipeline.from_pretrained(folder) for family, folder in folders.items()}
    for pipeline in loaded.values():
        pipeline.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def encoders(folders):
    return {family: models.of(folder).text_encoder(torch.float32, CPU) for family, folder in folders.items()}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def time_ids(batch, height=1333, width=1023):
    return torch.tensor([[height, width, 0, 513, 1024, 1024]] * batch, dtype=torch.int32)


def inputs(family, encoders, captions, seed=0, size=8):
    """What predict takes besides the network, for a batch of captions."""
    channels = families.get(family).latent_channels
    ids = time_ids(len(captions)) if family == "sdxl" else None
    t = torch.linspace(100, 900, len(captions)).round()
    return random(len(captions), channels, size, size, seed=seed), t, encoders[family].encode(captions), ids


@torch.no_grad()
def pipeline_conditions(family, pipeline, caption):
    embeds, *more = pipeline.encode_prompt(caption)
    pooled = {"sdxl": lambda: more[1][0], "flux": lambda: more[0][0]}.get(family)
    return {"embeds": embeds[0], **({"pooled": pooled()} if pooled else {})}


def calls_of(network, run):
    """Positional and named arguments of every call of a network while something runs."""
    calls = []
    hook = network.register_forward_pre_hook(lambda _, args, named: calls.append((args, named)), with_kwargs=True)
    run()
    hook.remove()
    return calls


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours.to(theirs.dtype), theirs.expand_as(ours))
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], it) for name, it in theirs.items())
    return ours == theirs


# Which model a folder is


def test_the_family_is_read_from_the_index_whatever_the_folder_is_called(folders, tmp_path):
    folder = tmp_path / "FLUX.1-dev"
    folder.mkdir()
    shutil.copy(folders["sdxl"] / "model_index.json", folder)
    assert models.of(folder).family.name == "sdxl"


def test_a_pipeline_of_no_family_is_refused_with_those_that_are_known(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(TrainerError, match=r"StableDiffusion3Pipeline.*StableDiffusionXLPipeline, FluxPipeline"):
        models.of(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_that_names_no_pipeline_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(TrainerError, match=r"model_index\.json names no pipeline"):
        models.of(tmp_path)


# Parts


@every_family
def test_each_part_is_loaded_without_the_others(family, folders, tmp_path):
    whole = folders[family]
    network = families.get(family).part

    def model_of(*parts):
        folder = tmp_path / "-".join(parts)
        folder.mkdir()
        shutil.copy(whole / "model_index.json", folder)
        for part in parts:
            shutil.copytree(whole / part, folder / part)
        return models.of(folder)

    texts = [it.name for it in whole.iterdir() if it.name.startswith(("text", "token"))]
    assert model_of(*texts).text_encoder(torch.float32, CPU).encode([SHORT])
    assert model_of("vae").vae(CPU)
    assert model_of(network).network(torch.float32, CPU)
    assert model_of("scheduler").noise_schedule()


@every_family
def test_a_network_is_frozen_and_of_the_number_type_asked_for(family, folders):
    network = models.of(folders[family]).network(torch.bfloat16, CPU)
    assert not any(it.requires_grad for it in network.parameters())
    assert {it.dtype for it in network.parameters()} == {torch.bfloat16}
    assert not network.training


def test_weights_that_are_not_safetensors_are_refused(folders, tmp_path):
    shutil.copytree(folders["sdxl"], tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, tmp_path / "unet" / "diffusion_pytorch_model.bin")
    weights.unlink()
    with pytest.raises(TrainerError, match=r"unet cannot be loaded as UNet2DConditionModel"):
        models.of(tmp_path).network(torch.float32, CPU)


def test_damaged_weights_are_named(folders, tmp_path):
    shutil.copytree(folders["z_image"], tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(TrainerError, match=r"text_encoder cannot be loaded as Qwen3Model"):
        models.of(tmp_path).text_encoder(torch.float32, CPU)


def test_a_folder_with_f16_files_only_is_loaded(folders, tmp_path):
    shutil.copytree(folders["sdxl"], tmp_path, dirs_exist_ok=True)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.rename(weights.with_suffix(".fp16.safetensors"))
    model = models.of(tmp_path)
    assert model.network(torch.float32, CPU)
    assert model.vae(CPU)
    assert model.text_encoder(torch.float32, CPU)


@pytest.mark.parametrize(("family", "other"), [("qwen_image", "sdxl"), ("sdxl", "z_image"), ("z_image", "sdxl")])
def test_a_tokenizer_of_another_class_is_refused(family, other, folders, tmp_path):
    shutil.copytree(folders[family], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "tokenizer")
    shutil.copytree(folders[other] / "tokenizer", tmp_path / "tokenizer")
    with pytest.raises(TrainerError, match=r"tokenizer is a \w+, and .* has a \w+: fetch it again"):
        models.of(tmp_path).text_encoder(torch.float32, CPU)


def test_a_tokenizer_with_more_tokens_than_its_encoder_is_refused(folders, tmp_path):
    shutil.copytree(folders["qwen_image"], tmp_path, dirs_exist_ok=True)
    tokenizer = demo_base.byte_tokenizer()
    tokenizer.add_tokens(["one", "more"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(TrainerError, match="has 261 tokens and its text encoder 260"):
        models.of(tmp_path).text_encoder(torch.float32, CPU)


# Captions


@every_family
@pytest.mark.parametrize("caption", [SHORT, LONG, "x" * 2000], ids=["short", "long", "truncated"])
def test_captions_are_encoded_as_the_pipeline_encodes_them(family, caption, encoders, pipelines):
    (ours,) = encoders[family].encode([caption])
    theirs = pipeline_conditions(family, pipelines[family], caption)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@every_family
def test_a_caption_is_encoded_alike_whatever_is_encoded_with_it(family, encoders):
    together = encoders[family].encode([SHORT, LONG, ""])
    alone = [encoders[family].encode([caption])[0] for caption in (SHORT, LONG, "")]
    for a, b in zip(together, alone, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


@every_family
def test_conditions_are_constants_with_memory_of_their_own(family, encoders):
    for tensor in encoders[family].encode([SHORT, LONG])[1].values():
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.is_contiguous()


@every_family
def test_conditions_have_the_number_type_of_the_encoder(family, folders):
    (conditions,) = models.of(folders[family]).text_encoder(torch.bfloat16, CPU).encode([SHORT])
    assert {it.dtype for it in conditions.values()} == {torch.bfloat16}


def test_shapes_of_conditions(encoders):
    shapes = {
        family: {name: tuple(it.shape) for name, it in encoders[family].encode([SHORT])[0].items()}
        for family in FAMILIES
    }
    template = encoders["qwen_image"].pipeline.prompt_template_encode
    assert shapes == {
        "sdxl": {"embeds": (77, 64), "pooled": (32,)},
        "flux": {"embeds": (512, 32), "pooled": (32,)},
        # Bytes, but for the four marks of the template that are a token each.
        "qwen_image": {"embeds": (encoders["qwen_image"].length(SHORT)[0], 32)},
        "z_image": {"embeds": (len("<>user\n" + SHORT + "<>\n<>assistant\n") - 3, 32)},
    }
    assert len(template) > encoders["qwen_image"].length(SHORT)[0] > 34


def test_the_empty_caption_of_sdxl_is_zeros_where_the_pipeline_says_so(folders, encoders, pipelines, tmp_path):
    (empty,) = encoders["sdxl"].encode([""])
    assert not any(it.any() for it in empty.values())

    shutil.copytree(folders["sdxl"], tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["force_zeros_for_empty_prompt"] is True
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"force_zeros_for_empty_prompt": False}))
    (encoded,) = models.of(tmp_path).text_encoder(torch.float32, CPU).encode([""])
    expected = pipeline_conditions("sdxl", pipelines["sdxl"], "")
    assert all(torch.equal(encoded[name], expected[name]) for name in expected)
    assert all(it.any() for it in encoded.values())


@every_flow
def test_the_empty_caption_of_the_others_goes_through_the_encoders(family, encoders, pipelines):
    (empty,) = encoders[family].encode([""])
    expected = pipeline_conditions(family, pipelines[family], "")
    assert all(torch.equal(empty[name], expected[name]) for name in expected)
    assert all(len(it) and it.any() for it in empty.values())


@every_family
def test_the_length_of_a_caption_says_what_is_cut_off(family, encoders):
    wanted, taken = encoders[family].length(SHORT)
    longer, _ = encoders[family].length(SHORT + "xyz")
    assert wanted == taken
    # T5's and CLIP's tokens of these letters are one each, and so are bytes.
    assert longer == wanted + 3
    limit = families.get(family).text_tokens
    assert encoders[family].length("x" * 3000)[1] == limit
    assert encoders[family].length("x" * 3000)[0] > limit
    rows = len(encoders[family].encode(["x" * 3000])[0]["embeds"])
    assert rows == limit


def test_the_instruction_of_qwen_image_is_as_long_as_what_its_pipeline_drops(encoders, tmp_path):
    if not tiny_models.shared("tokenizers/qwen2/merges.txt"):
        pytest.skip("the merges of Qwen2 are not beside the checkout")
    tokenizer = Qwen2Tokenizer.from_pretrained(tiny_models.qwen2_tokenizer(tmp_path, merges=110000))
    instruction = encoders["qwen_image"].pipeline.prompt_template_encode.split("{}")[0]
    assert len(tokenizer(instruction).input_ids) == 34


# Pictures


@every_family
def test_mean_and_std_are_what_a_sample_of_the_posterior_is_made_of(family, folders, pipelines):
    pixels = random(2, 3, 64, 48).tanh()
    mean, std = models.of(folders[family]).vae(CPU).encode(pixels)
    assert mean.shape == std.shape == (2, families.get(family).latent_channels, 8, 6)
    vae = pipelines[family].vae
    for number, picture in enumerate(pixels):
        frames = picture[None, :, None] if family == "qwen_image" else picture[None]
        sample = vae.encode(frames).latent_dist.sample(generator=torch.Generator().manual_seed(1)).detach()
        epsilon = random(*sample.shape, seed=1)
        if family == "qwen_image":
            channel_means = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
            latents = (sample - channel_means) / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
            latents, epsilon = latents[:, :, 0], epsilon[:, :, 0]
        else:
            latents = (sample - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        torch.testing.assert_close(mean[number] + std[number] * epsilon[0], latents[0], atol=1e-6, rtol=1e-6)


@every_family
def test_latents_are_decoded_as_the_pipeline_decodes_them(family, folders, pipelines):
    pipeline, found = pipelines[family], []
    decode = pipeline.vae.decode
    pipeline.vae.decode = lambda latents, **named: found.append(latents) or decode(latents, **named)
    pictures = pipeline("a cat", height=64, width=48, num_inference_steps=2, output_type="pt").images
    pipeline.vae.decode = decode

    vae = models.of(folders[family]).vae(CPU)
    latents = found[0][:, :, 0] if family == "qwen_image" else found[0]
    pixels = vae.decode((latents - vae.shift) * vae.scale)
    torch.testing.assert_close(pixels / 2 + 0.5, pictures, atol=1e-5, rtol=0)


@every_family
def test_a_picture_is_encoded_alike_whatever_is_encoded_with_it(family, folders):
    vae = models.of(folders[family]).vae(CPU)
    pixels = random(3, 3, 32, 32).tanh()
    together, alone = vae.encode(pixels), [vae.encode(it[None]) for it in pixels]
    assert torch.equal(together[0], torch.cat([mean for mean, _ in alone]))
    assert torch.equal(together[1], torch.cat([std for _, std in alone]))


@every_family
def test_the_vae_is_f32_though_its_files_are_f16(family, folders, pipelines, tmp_path):
    shutil.copytree(folders[family], tmp_path, dirs_exist_ok=True)
    type(pipelines[family].vae).from_pretrained(tmp_path / "vae", torch_dtype=torch.float16).save_pretrained(
        tmp_path / "vae"
    )
    vae = models.of(tmp_path).vae(CPU)
    assert {it.dtype for it in vae.vae.parameters()} == {torch.float32}
    assert {it.dtype for it in vae.encode(random(1, 3, 32, 32).half())} == {torch.float32}


def test_the_means_of_channels_in_an_sdxl_vae_are_folded_in(folders, tmp_path):
    shutil.copytree(folders["sdxl"], tmp_path, dirs_exist_ok=True)
    config = tmp_path / "vae" / "config.json"
    means, stds = [0.1, 0.2, -0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"latents_mean": means, "latents_std": stds}))
    pixels = random(1, 3, 32, 32).tanh()
    plain, _ = models.of(folders["sdxl"]).vae(CPU).encode(pixels)
    folded, _ = models.of(tmp_path).vae(CPU).encode(pixels)
    # The pipeline decodes latents * std / scale + mean.
    undone = folded * torch.tensor(stds).view(1, -1, 1, 1) / 4 + torch.tensor(means).view(1, -1, 1, 1)
    torch.testing.assert_close(undone, plain / 4, atol=1e-6, rtol=1e-5)


# Predictions


@every_family
def test_the_network_is_fed_and_understood_as_in_the_pipeline(family, folders, encoders, pipelines):
    pipeline, model = pipelines[family], models.of(folders[family])
    network = getattr(pipeline, families.get(family).part)
    steps = []
    step = pipeline.scheduler.step

    def recorded(output, t, sample, **named):
        steps.append((output, t, sample))
        return step(output, t, sample, **named)

    # No second prediction for classifier-free guidance.
    guidance = {"sdxl": 1.0, "flux": 2.5, "z_image": 0.0}.get(family)
    settings = {} if guidance is None else {"guidance_scale": guidance}
    pipeline.scheduler.step = recorded
    theirs = calls_of(
        network,
        lambda: pipeline(LONG, height=64, width=48, num_inference_steps=2, output_type="latent", **settings),
    )
    del pipeline.scheduler.step

    conditions = encoders[family].encode([LONG])
    ids = torch.tensor([[64, 48, 0, 0, 64, 48]]) if family == "sdxl" else None
    for number, (output, t, sample) in enumerate(steps):
        args, named = theirs[number]
        noisy = args[0] if family == "sdxl" else sample if family == "z_image" else base.unpacked(sample, 8, 6)
        said = []
        (mine,) = calls_of(
            network,
            lambda noisy=noisy, t=t, said=said: said.append(
                model.predict(network, noisy, t[None], conditions, ids, guidance or 1.0)
            ),
        )
        if family == "qwen_image":
            assert mine[1].pop("encoder_hidden_states_mask").all()
            assert named["encoder_hidden_states_mask"] is None
        own = {name: it for name, it in named.items() if it is not None and name in mine[1]}
        assert same({name: mine[1][name] for name in own}, own)
        assert {it for it in named if named[it] is not None} - {
            "attention_kwargs", "joint_attention_kwargs", "cross_attention_kwargs", "timestep_cond"
        } == {it for it in mine[1] if mine[1][it] is not None}  # fmt: skip
        assert same(list(mine[0]), list(args))
        prediction = said[0] if output.ndim == 4 else base.packed(said[0])
        # With a mask, attention is computed by another kernel.
        torch.testing.assert_close(prediction, output.float(), atol=2e-6 if family == "qwen_image" else 0, rtol=0)


def test_patches_are_those_of_the_pipelines(pipelines):
    latents = random(2, 16, 8, 6)
    for family in ("flux", "qwen_image"):
        theirs = pipelines[family]._pack_latents(latents, 2, 16, 8, 6)
        assert torch.equal(base.packed(latents), theirs)
    assert torch.equal(base.unpacked(base.packed(latents), 8, 6), latents)


@every_family
def test_captions_of_different_lengths_do_not_see_each_other(family, folders, encoders):
    model = models.of(folders[family])
    network = model.network(torch.float32, CPU)
    noisy, t, conditions, ids = inputs(family, encoders, [SHORT, LONG])
    together = model.predict(network, noisy, t, conditions, ids)
    for number in range(2):
        one = slice(number, number + 1)
        alone = model.predict(network, noisy[one], t[one], conditions[one], None if ids is None else ids[one])
        torch.testing.assert_close(together[one], alone, atol=2e-6, rtol=1e-5)


def test_a_mask_is_given_to_qwen_image_where_nothing_is_padded_too(folders, encoders):
    model = models.of(folders["qwen_image"])
    network = model.network(torch.float32, CPU)
    ((_, named),) = calls_of(network, lambda: model.predict(network, *inputs("qwen_image", encoders, [SHORT, SHORT])))
    assert named["encoder_hidden_states_mask"].dtype == torch.bool
    assert named["encoder_hidden_states_mask"].all()


def test_time_ids_stay_exact_in_a_bf16_network(folders, encoders):
    model = models.of(folders["sdxl"])
    network = model.network(torch.bfloat16, CPU)
    ((args, _),) = calls_of(network.add_time_proj, lambda: model.predict(network, *inputs("sdxl", encoders, [SHORT])))
    assert args[0].tolist() == [1333, 1023, 0, 513, 1024, 1024]


@every_family
def test_timesteps_and_positions_are_f32_in_a_bf16_network_and_latents_are_not(family, folders, encoders):
    model = models.of(folders[family])
    network = model.network(torch.bfloat16, CPU)
    said = []
    ((args, named),) = calls_of(
        network, lambda: said.append(model.predict(network, *inputs(family, encoders, [SHORT, LONG])))
    )
    exact = [named[name] for name in ("timestep", "img_ids", "txt_ids", "guidance") if name in named]
    exact += [args[1]] if family in ("sdxl", "z_image") else []
    assert exact
    assert {it.dtype for it in exact} == {torch.float32}
    first = named.get("hidden_states", args[0] if args else None)
    assert {it.dtype for it in first} == {torch.bfloat16}
    assert said[0].dtype == torch.float32


@every_family
def test_an_f32_lora_trains_on_a_bf16_network(family, folders, encoders):
    model = models.of(folders[family])
    network = model.network(torch.bfloat16, CPU)
    torch.manual_seed(0)
    network.add_adapter(LoraConfig(r=2, target_modules=list(families.get(family).targets)))
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    noisy, t, conditions, ids = inputs(family, encoders, [SHORT, LONG])
    model.predict(network, noisy, t, conditions, ids).square().mean().backward()
    last = models.of(folders[family]).config(families.get(family).part).get("num_layers", 0) - 1
    dead = [it.format(last=last) for it in families.get(family).dead]
    trained = {name: it for name, it in network.named_parameters() if it.requires_grad}
    assert {it.dtype for it in trained.values()} == {torch.float32}
    assert all(it.grad is None for name, it in network.named_parameters() if name not in trained)
    for name, parameter in trained.items():
        if "lora_B" in name:
            live = parameter.grad is not None and bool(parameter.grad.any())
            assert live != any(name.startswith(it) for it in dead), name


@every_family
def test_a_network_says_the_same_by_another_kernel_of_attention(family, folders, encoders, request):
    model = models.of(folders[family])
    network = model.network(torch.float32, CPU)
    given = inputs(family, encoders, [SHORT, LONG])
    one = model.predict(network, *given)
    if family == "sdxl":
        network.set_attn_processor(AttnProcessor())
    else:
        request.addfinalizer(lambda: network.set_attention_backend("native"))  # it is for the whole process
        network.set_attention_backend("_native_math")
    torch.testing.assert_close(model.predict(network, *given), one, atol=1e-5, rtol=1e-5)


@every_family
def test_guidance_changes_only_a_network_that_it_is_distilled_into(family, folders, encoders):
    model = models.of(folders[family])
    network = model.network(torch.float32, CPU)
    given = inputs(family, encoders, [SHORT])
    one, other = (model.predict(network, *given, guidance=it) for it in (1.0, 3.5))
    assert torch.equal(one, other) == (family != "flux")


def test_flux_without_distilled_guidance_is_given_none(folders, encoders, tmp_path):
    shutil.copytree(folders["flux"], tmp_path, dirs_exist_ok=True)
    config = FluxTransformer2DModel.load_config(tmp_path / "transformer")
    FluxTransformer2DModel.from_config({**config, "guidance_embeds": False}).save_pretrained(tmp_path / "transformer")
    model = models.of(tmp_path)
    network = model.network(torch.float32, CPU)
    ((_, named),) = calls_of(network, lambda: model.predict(network, *inputs("flux", encoders, [SHORT])))
    assert named["guidance"] is None


# The published models

SDXL_UNET = {
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}


@pytest.mark.parametrize(
    ("family", "kind", "config", "modules"),
    [
        ("sdxl", UNet2DConditionModel, SDXL_UNET, 560),
        ("flux", FluxTransformer2DModel, {"guidance_embeds": True}, 266),
        ("qwen_image", QwenImageTransformer2DModel, {}, 480),
        ("z_image", ZImageTransformer, {}, 136),
    ],
)
def test_sizes_and_targets_of_the_published_networks(family, kind, config, modules):
    with torch.device("meta"):
        network = kind(**config)
    facts = families.get(family)
    assert kind.__name__ == facts.network
    size = sum(it.numel() for it in network.parameters()) * 2
    assert round(size / 1e9, 2) == facts.gigabytes
    targets = [
        it for name, it in network.named_modules() if name.endswith(tuple(f".{target}" for target in facts.targets))
    ]
    assert len(targets) == modules
    assert {type(it) for it in targets} == {torch.nn.Linear}


# The demo's base


def test_the_demo_base_is_the_same_bytes_each_time_and_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    for name in ("one", "two"):
        demo_base.build(tmp_path / name)
    assert torch.equal(torch.rand(1), expected)
    files = sorted(it.relative_to(tmp_path / "one") for it in (tmp_path / "one").rglob("*") if it.is_file())
    assert len(files) > 10
    assert all((tmp_path / "one" / it).read_bytes() == (tmp_path / "two" / it).read_bytes() for it in files)
    assert isinstance(models.of(tmp_path / "one").noise_schedule(), Flow)
