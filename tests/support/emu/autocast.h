// Autocast with the rules of CPUs, so that the bits are theirs (torch's docs, "Autocast Op Reference").
#pragma once
#include <ATen/autocast_mode.h>

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  NARROW(conv1d) NARROW(conv1d, padding) NARROW(conv2d) NARROW(conv2d, padding) NARROW(conv3d) NARROW(conv3d, padding)
  NARROW(conv_transpose1d) NARROW(conv_transpose2d, input) NARROW(conv_transpose3d, input)
  NARROW(linear) NARROW(matmul) NARROW(mm) NARROW(bmm) NARROW(addmm) NARROW(addbmm) NARROW(baddbmm)
  NARROW(prelu) NARROW(scaled_dot_product_attention)

  WIDE(prod) WIDE(prod, dim_int) WIDE(cdist) WIDE(mse_loss) WIDE(l1_loss) WIDE(smooth_l1_loss) WIDE(huber_loss)
  WIDE(nll_loss) WIDE(nll_loss2d) WIDE(cross_entropy_loss) WIDE(kl_div) WIDE(poisson_nll_loss)
  WIDE(binary_cross_entropy) WIDE(binary_cross_entropy_with_logits) WIDE(cosine_embedding_loss)
  WIDE(hinge_embedding_loss) WIDE(margin_ranking_loss) WIDE(soft_margin_loss) WIDE(triplet_margin_loss)
  WIDE(multi_margin_loss) WIDE(multilabel_margin_loss)
  WIDE(avg_pool3d) WIDE(max_pool3d) WIDE(adaptive_avg_pool3d) WIDE(adaptive_max_pool3d)
  WIDE(fractional_max_pool2d) WIDE(fractional_max_pool3d) WIDE(max_unpool2d) WIDE(max_unpool3d)
  WIDE(reflection_pad1d) WIDE(reflection_pad2d) WIDE(replication_pad1d) WIDE(replication_pad2d) WIDE(grid_sampler)

  WIDEST(stack) WIDEST(cat)
}

#undef NARROW
#undef WIDE
#undef WIDEST
}  // namespace at::autocast
