"""Trains a DDPM with an average of its weights; our own program, of the shape of a public one.

The original: https://github.com/huggingface/diffusers/blob/main/examples/unconditional_image_generation/train_unconditional.py
The same: diffusers' UNet2DModel, DDPMScheduler and EMAModel, noise and time steps that the loop
draws, the mean squared error of the noise, clipped gradients, AdamW, a schedule with a warm-up.
Different: a smaller network, images made here, and no accelerate prepares the parts.
"""

import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader


def images(count):
    """Make images of 8 x 8 pixels, each a bright square on a dark ground."""
    generator = torch.Generator().manual_seed(0)
    made = torch.full((count, 1, 8, 8), -1.0)
    corners = torch.randint(5, (count, 2), generator=generator).tolist()
    for image, (top, left) in zip(made, corners, strict=True):
        image[:, top : top + 3, left : left + 3] = 1.0
    return [{"input": image} for image in made]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--lr_warmup_steps", type=int, default=3)
    parser.add_argument("--ddpm_num_steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    ema_model = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
    noise_scheduler = DDPMScheduler(num_train_timesteps=args.ddpm_num_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=1e-6)
    train_dataloader = DataLoader(images(96), args.train_batch_size, shuffle=True)
    steps = args.num_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler("cosine", optimizer, None, args.lr_warmup_steps, steps)

    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            clean_images = batch["input"]
            noise = torch.randn(clean_images.shape)
            timesteps = torch.randint(args.ddpm_num_steps, (len(clean_images),))
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            model_output = model(noisy_images, timesteps).sample
            loss = F.mse_loss(model_output, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema_model.step(model.parameters())
            first = ema_model.shadow_params[0].sum().item()
            print(f"epoch {epoch}, step {step}: loss {loss.item():.6f}, average {first:.9f}")

    ema_model.copy_to(model.parameters())
    pipeline = DDPMPipeline(model, noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    sample = pipeline(2, num_inference_steps=5, output_type="np").images
    print(f"two images, brightness {sample.mean():.3f}")


if __name__ == "__main__":
    main()
