import math

import numpy as np
import pytest
import tiny_pipelines
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from trainer.errors import TrainerError
from trainer.lora import families, models, objective
from trainer.lora.objective import BANDS, Diffusion, Flow

SDXL = tiny_pipelines.SDXL_SCHEDULER
FLUX = tiny_pipelines.FLUX_SCHEDULER
QWEN = tiny_pipelines.QWEN_SCHEDULER
Z_IMAGE = {"num_train_timesteps": 1000, "shift": 3.0}
VELOCITY = SDXL | {"prediction_type": "v_prediction"}
# Latents of 512 and of 1024 pixels a side.
SMALL, LARGE = (64, 64), (128, 128)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def sigmas(flow, raw, size=SMALL):
    return (flow.timesteps(torch.tensor(raw), size) / 1000).tolist()


# Levels


@pytest.mark.parametrize("how", ["uniform", "logit_normal"])
def test_levels_are_a_function_of_the_generator_alone(how):
    first = objective.levels(5, how, generator(1))
    assert torch.equal(first, objective.levels(5, how, generator(1)))
    assert not torch.equal(first, objective.levels(5, how, generator(2)))
    assert first.dtype == torch.float32


def test_levels_are_spread_as_their_names_say():
    uniform = objective.levels(50_000, "uniform", generator())
    normal = objective.levels(50_000, "logit_normal", generator())
    edges = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    torch.testing.assert_close(uniform.quantile(edges), edges, atol=0.01, rtol=0)
    # Quantiles of a standard normal variable, through the sigmoid.
    expected = torch.distributions.Normal(0, 1).icdf(edges).sigmoid()
    torch.testing.assert_close(normal.quantile(edges), expected, atol=0.01, rtol=0)
    for level in (uniform, normal):
        assert level.min() >= 0
        assert level.max() < 1


# The loss


def test_the_loss_is_the_mean_of_squares_of_each_item_in_f32():
    prediction, target = random(3, 4, 8, 8).bfloat16(), random(3, 4, 8, 8, seed=1)
    found = objective.loss(prediction, target)
    assert found.dtype == torch.float32
    expected = [(prediction[it].double() - target[it].double()).square().mean().item() for it in range(3)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_mask_weighs_where_the_loss_counts_and_not_how_much():
    prediction, target = random(2, 4, 8, 8), random(2, 4, 8, 8, seed=1)
    mask = torch.zeros(2, 8, 8)
    mask[0, :2, :2] = 1
    mask[1] = 0.25
    masked, plain = objective.loss(prediction, target, mask), objective.loss(prediction, target)
    assert masked[0] == pytest.approx((prediction - target)[0, :, :2, :2].square().mean().item(), rel=1e-5)
    assert masked[1] == pytest.approx(plain[1].item(), rel=1e-5)
    assert objective.loss(prediction, target, torch.zeros(2, 8, 8)).tolist() == [0, 0]


# Diffusion


@pytest.mark.parametrize("config", [SDXL, VELOCITY])
def test_noise_and_targets_are_those_of_the_scheduler(config):
    schedule, theirs = Diffusion(config), DDPMScheduler.from_config(config)
    latents, noise = random(5, 4, 8, 8), random(5, 4, 8, 8, seed=1)
    t = torch.tensor([0.0, 100.0, 250.0, 500.0, 999.0])
    torch.testing.assert_close(schedule.noisy(latents, noise, t), theirs.add_noise(latents, noise, t.long()))
    velocity = config is VELOCITY
    expected = theirs.get_velocity(latents, noise, t.long()) if velocity else noise
    torch.testing.assert_close(schedule.target(latents, noise, t), expected)


@pytest.mark.parametrize("config", [SDXL, VELOCITY])
def test_a_right_diffusion_prediction_takes_the_pipelines_scheduler_to_the_latents(config):
    schedule, scheduler = Diffusion(config), EulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(4)
    latents, noise, t = random(1, 4, 8, 8), random(1, 4, 8, 8, seed=1), scheduler.timesteps[1]
    scheduler._init_step_index(t)
    sigma, following = scheduler.sigmas[1:3]
    sample = latents + sigma * noise
    # What the network sees there is what training adds.
    torch.testing.assert_close(
        scheduler.scale_model_input(sample, t), schedule.noisy(latents, noise, t[None]), atol=1e-4, rtol=1e-4
    )
    stepped = scheduler.step(schedule.target(latents, noise, t[None]), t, sample).prev_sample
    torch.testing.assert_close(stepped, latents + following * noise, atol=1e-3, rtol=1e-3)


def test_diffusion_timesteps_are_whole_and_all_are_drawn_alike():
    schedule = Diffusion(SDXL)
    t = schedule.timesteps(torch.arange(1000) / 1000 + 0.0005, SMALL)
    assert t.tolist() == list(range(1000))
    assert schedule.timesteps(torch.tensor([0.0, 1.0]), SMALL).tolist() == [0, 999]
    assert schedule.timesteps(torch.tensor(BANDS), LARGE).tolist() == [100, 300, 500, 700, 900]
    assert t.dtype == torch.float32


def test_min_snr_weights_of_noise():
    schedule = Diffusion(SDXL, snr_gamma=5.0)
    weights = schedule.weights(torch.arange(1000.0))
    assert [round(weights[t].item(), 4) for t in (0, 100, 250)] == [0.0043, 0.5914, 1.0]
    assert round(weights.mean().item(), 3) == 0.917


def test_min_snr_weights_of_velocity():
    schedule, t = Diffusion(VELOCITY, snr_gamma=5.0), torch.tensor([0.0, 100.0, 900.0])
    a = DDPMScheduler.from_config(VELOCITY).alphas_cumprod[t.long()].double()
    snr = a / (1 - a)
    torch.testing.assert_close(schedule.weights(t).double(), snr.clamp(max=5) / (snr + 1), rtol=1e-5, atol=0)


def test_without_gamma_all_weigh_alike():
    assert Diffusion(SDXL).weights(torch.tensor([0.0, 999.0])).tolist() == [1, 1]
    assert Flow(FLUX).weights(torch.tensor([20.0, 999.0])).tolist() == [1, 1]


def test_a_network_that_predicts_latents_is_refused():
    with pytest.raises(TrainerError, match=r"predicts 'sample'.*use another base"):
        Diffusion(SDXL | {"prediction_type": "sample"})


def test_a_scheduler_without_betas_is_refused():
    with pytest.raises(TrainerError, match=r"EDMEulerScheduler .* has no beta_schedule"):
        Diffusion({"_class_name": "EDMEulerScheduler", "prediction_type": "epsilon", "sigma_data": 0.5})


def test_a_last_timestep_without_signal_goes_with_velocity_and_not_with_min_snr_of_noise():
    zero = {"rescale_betas_zero_snr": True}
    with pytest.raises(TrainerError, match=r"rescale_betas_zero_snr.*set lora\.snr_gamma to 0"):
        Diffusion(SDXL | zero, snr_gamma=5.0)
    assert Diffusion(SDXL | zero).weights(torch.tensor([999.0])).tolist() == [1]
    schedule, t = Diffusion(VELOCITY | zero, snr_gamma=5.0), torch.arange(1000.0)
    assert schedule.weights(t).isfinite().all()
    latents, noise = random(1, 4, 8, 8), random(1, 4, 8, 8, seed=1)
    assert torch.equal(schedule.noisy(latents, noise, t[-1:]), noise)
    torch.testing.assert_close(schedule.target(latents, noise, t[-1:]), -latents)


# Flow


def test_shifts_are_those_of_generating():
    # log 3 at each size, with a terminal sigma: raw .9, .5 and .1, and the last.
    log3 = Flow(QWEN | {"base_shift": math.log(3), "max_shift": math.log(3)})
    raw = [0.9, 0.5, 0.1, 0.001]
    for size in (SMALL, LARGE):
        assert [round(it, 4) for it in sigmas(log3, raw, size)] == [0.9649, 0.7543, 0.2628, 0.02]
    for size in (SMALL, LARGE):
        assert [round(it, 4) for it in sigmas(Flow(Z_IMAGE), raw[:3], size)] == [0.9643, 0.75, 0.25]
    for size, mu, shift in ((SMALL, 0.63, 1.8776106), (LARGE, 1.15, 3.1581929)):
        assert math.exp(mu) == pytest.approx(shift)
        expected = [shift * it / (1 + (shift - 1) * it) for it in raw]
        assert sigmas(Flow(FLUX), raw, size) == pytest.approx(expected, rel=1e-5)
    # Pictures that are not square are shifted by their area.
    assert sigmas(Flow(FLUX), raw, (32, 128)) == sigmas(Flow(FLUX), raw, SMALL)


@pytest.mark.parametrize("config", [FLUX, QWEN, Z_IMAGE])
def test_the_schedule_is_the_table_of_the_scheduler_when_generating(config):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    raw = np.linspace(1.0, 1 / 1000, 1000)
    low, high = config.get("base_shift", 0), config.get("max_shift", 0)
    mu = low + (high - low) * (1024 - 256) / (config.get("max_image_seq_len", 4096) - 256)
    scheduler.set_timesteps(sigmas=raw, mu=mu)
    schedule = Flow(config)
    found = schedule.timesteps(torch.from_numpy(raw).float(), SMALL)
    torch.testing.assert_close(found, scheduler.timesteps, rtol=1e-6, atol=1e-4)
    if config.get("use_dynamic_shifting"):
        # The table a scheduler is made with is not shifted.
        assert (found - FlowMatchEulerDiscreteScheduler(**config).timesteps).abs().max() > 50


def test_a_level_is_shifted_alike_whatever_is_drawn_with_it():
    schedule = Flow(QWEN)
    together = schedule.timesteps(torch.tensor([0.9, 0.001, 0.4]), SMALL)
    alone = [schedule.timesteps(torch.tensor([it]), SMALL) for it in (0.9, 0.001, 0.4)]
    assert torch.equal(together, torch.cat(alone))


def test_a_number_takes_the_place_of_the_schedulers_shift():
    raw = [0.9, 0.5, 0.1]
    for config in (FLUX, Z_IMAGE):
        for size in (SMALL, LARGE):
            assert sigmas(Flow(config, 1.0), raw, size) == pytest.approx(raw, rel=1e-5)
            assert sigmas(Flow(config, 2.5), raw, size) == pytest.approx([2.5 * it / (1 + 1.5 * it) for it in raw])
    # The end that the network knows stays.
    assert sigmas(Flow(QWEN, 2.5), [0.001]) == pytest.approx([0.02], rel=1e-4)


def test_flow_timesteps_have_noise_and_are_f32_though_the_level_is_zero():
    t = Flow(FLUX).timesteps(torch.tensor([0.0, 1.0]), SMALL)
    assert t.dtype == torch.float32
    assert 0 < t[0] < 2
    assert t[1] == 1000


@pytest.mark.parametrize("config", [FLUX, QWEN, Z_IMAGE])
def test_a_right_flow_prediction_takes_the_pipelines_scheduler_to_the_latents(config):
    schedule, scheduler = Flow(config), FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(sigmas=[1.0, 0.7, 0.4], mu=0.63)
    latents, noise = random(1, 16, 8, 8), random(1, 16, 8, 8, seed=1)
    for number, t in enumerate(scheduler.timesteps):
        noisy, target = schedule.noisy(latents, noise, t[None]), schedule.target(latents, noise, t[None])
        stepped = scheduler.step(target, t, noisy, return_dict=False)[0]
        following = scheduler.sigmas[number + 1]
        torch.testing.assert_close(stepped, (1 - following) * latents + following * noise, atol=1e-5, rtol=1e-5)


# By model


@pytest.mark.parametrize("family", families.names())
def test_a_model_has_the_schedule_of_its_scheduler(family, tmp_path):
    changed = {"prediction_type": "v_prediction"} if family == "sdxl" else {"shift": 6.0, "use_dynamic_shifting": False}
    model = models.of(tiny_pipelines.save(family, tmp_path, **changed))
    schedule = model.noise_schedule()
    if family == "sdxl":
        assert (schedule.prediction, schedule.snr_gamma) == ("v_prediction", 0)
        assert model.noise_schedule(snr_gamma=5.0).snr_gamma == 5
        with pytest.raises(TrainerError, match=r"lora\.flow_shift"):
            model.noise_schedule(flow_shift=3.0)
    else:
        last = 0.02 if family == "qwen_image" else 6 * 0.001 / (1 + 5 * 0.001)
        stretch = (1 - last) / (1 - 6 * 0.001 / (1 + 5 * 0.001))
        assert sigmas(schedule, [0.5]) == pytest.approx([1 - (1 - 3 / 3.5) * stretch], rel=1e-5)
        assert sigmas(model.noise_schedule(flow_shift=1.0), [1.0, 0.5])[0] == 1
        with pytest.raises(TrainerError, match=r"lora\.snr_gamma"):
            model.noise_schedule(snr_gamma=5.0)
