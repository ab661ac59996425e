"""Operators that are known to be portable, by the types of their floating operands other than float32.

Made by `python -m tests.numerics.sweep --write`: each has run in some of 1,855 computations, forward and backward,
which gave the same bits on a CPU with AVX-512, EPYC and Haswell.
"""

KNOWN_BY_TYPES = {
    "": """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._adaptive_avg_pool3d.default
    aten._adaptive_avg_pool3d_backward.default aten._batch_norm_with_update.default aten._cdist_backward.default
    aten._cdist_forward.default aten._chunk_cat.default aten._ctc_loss.Tensor aten._ctc_loss.default
    aten._ctc_loss_backward.Tensor aten._ctc_loss_backward.default aten._efficientzerotensor.default
    aten._embedding_bag.default aten._embedding_bag_backward.default
    aten._embedding_bag_per_sample_weights_backward.default aten._euclidean_dist.default aten._fft_r2c.default
    aten._foreach_abs.default aten._foreach_add.List aten._foreach_add.Scalar aten._foreach_add_.List
    aten._foreach_add_.Scalar aten._foreach_add_.ScalarList aten._foreach_add_.Tensor aten._foreach_addcdiv_.Scalar
    aten._foreach_addcdiv_.ScalarList aten._foreach_addcmul_.Scalar aten._foreach_clamp_min_.Scalar
    aten._foreach_copy_.default aten._foreach_div_.List aten._foreach_div_.ScalarList aten._foreach_lerp_.Scalar
    aten._foreach_lerp_.ScalarList aten._foreach_maximum_.List aten._foreach_mul.List aten._foreach_mul.ScalarList
    aten._foreach_mul_.List aten._foreach_mul_.Scalar aten._foreach_mul_.ScalarList aten._foreach_mul_.Tensor
    aten._foreach_norm.Scalar aten._foreach_reciprocal_.default aten._foreach_rsqrt_.default aten._foreach_sign_.default
    aten._foreach_sqrt.default aten._foreach_sqrt_.default aten._foreach_sub.List aten._fused_adagrad_.default
    aten._fused_adam_.default aten._fused_adamw_.default aten._fused_sgd_.default aten._histogramdd_bin_edges.default
    aten._histogramdd_from_bin_cts.default aten._histogramdd_from_bin_tensors.default aten._linalg_check_errors.default
    aten._linalg_det.default aten._linalg_eigh.default aten._linalg_slogdet.default aten._linalg_solve_ex.default
    aten._linalg_svd.default aten._local_scalar_dense.default aten._log_softmax.default
    aten._log_softmax_backward_data.default aten._native_batch_norm_legit.default
    aten._native_multi_head_attention.default aten._pdist_backward.default aten._pdist_forward.default
    aten._prelu_kernel.default aten._prelu_kernel_backward.default aten._safe_softmax.default
    aten._scaled_dot_product_flash_attention_for_cpu.default
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._segment_reduce_backward.default
    aten._softmax.default aten._softmax_backward_data.default aten._sparse_mm_reduce_impl.default
    aten._sparse_mm_reduce_impl_backward.default aten._to_copy.default aten._to_dense.default aten._to_sparse.default
    aten._to_sparse.sparse_dim aten._to_sparse_csr.default aten._transformer_encoder_layer_fwd.default
    aten._trilinear.default aten._unique.default aten._unique2.default aten._unsafe_masked_index.default
    aten._unsafe_masked_index_put_accumulate.default aten._unsafe_view.default aten._upsample_bilinear2d_aa.default
    aten._upsample_bilinear2d_aa_backward.default aten._upsample_nearest_exact1d.default
    aten._upsample_nearest_exact1d_backward.default aten.abs.default aten.abs_.default aten.acos.default
    aten.acosh.default aten.adaptive_max_pool2d.default aten.adaptive_max_pool2d_backward.default
    aten.adaptive_max_pool3d.default aten.adaptive_max_pool3d_backward.default aten.add.Scalar aten.add.Tensor
    aten.add_.Scalar aten.add_.Tensor aten.addbmm.default aten.addcdiv.default aten.addcdiv_.default
    aten.addcmul.default aten.addcmul_.default aten.addmm.default aten.addmm.out aten.addmm_.default aten.addmv.default
    aten.addr.default aten.alias.default aten.alias_copy.default aten.all.default aten.all.dim aten.all.dims
    aten.allclose.default aten.amax.default aten.amax.out aten.amin.default aten.aminmax.default aten.angle.default
    aten.any.default aten.any.dim aten.any.dims aten.arange.default aten.arange.start aten.arange.start_step
    aten.argmax.default aten.argmin.default aten.as_strided.default aten.as_strided_copy.default
    aten.as_strided_scatter.default aten.asin.default aten.asinh.default aten.atan.default aten.atan2.default
    aten.atanh.default aten.avg_pool2d.default aten.avg_pool2d_backward.default aten.avg_pool3d.default
    aten.avg_pool3d_backward.default aten.baddbmm.default aten.batch_norm_backward.default aten.bernoulli.default
    aten.bernoulli_.float aten.binary_cross_entropy.default aten.binary_cross_entropy_backward.default
    aten.binary_cross_entropy_with_logits.default aten.bincount.default aten.bitwise_and.Tensor aten.bitwise_and_.Tensor
    aten.bitwise_left_shift.Tensor aten.bitwise_not.default aten.bitwise_or.Tensor aten.bitwise_or_.Tensor
    aten.bitwise_right_shift.Tensor aten.bitwise_xor.Tensor aten.block_diag.default aten.bmm.default
    aten.bucketize.Tensor aten.cat.default aten.cauchy_.default aten.ceil.default aten.ceil_.default aten.celu.default
    aten.channel_shuffle.default aten.cholesky_solve.default aten.clamp.Tensor aten.clamp.default aten.clamp_.default
    aten.clamp_max.Tensor aten.clamp_min.Tensor aten.clamp_min.default aten.clamp_min_.Tensor aten.clamp_min_.default
    aten.clone.default aten.col2im.default aten.complex.default aten.constant_pad_nd.default aten.convolution.default
    aten.convolution_backward.default aten.copy_.default aten.copysign.Tensor aten.cos.default aten.cosh.default
    aten.count_nonzero.default aten.count_nonzero.dim_IntList aten.cummax.default aten.cummin.default
    aten.cumprod.default aten.cumsum.default aten.cumsum_.default aten.deg2rad.default aten.detach.default
    aten.diag_embed.default aten.diagonal.default aten.diagonal_backward.default aten.diagonal_copy.default
    aten.diagonal_scatter.default aten.digamma.default aten.digamma_.default aten.dist.default aten.div.Scalar
    aten.div.Tensor aten.div.Tensor_mode aten.div.out aten.div_.Scalar aten.div_.Tensor aten.dot.default
    aten.elu.default aten.elu_backward.default aten.embedding.default aten.embedding_dense_backward.default
    aten.empty.memory_format aten.empty_like.default aten.eq.Scalar aten.eq.Tensor aten.equal.default aten.erf.default
    aten.erfc.default aten.erfinv.default aten.exp.default aten.exp2.default aten.exp_.default aten.expand.default
    aten.expand_copy.default aten.expm1.default aten.exponential_.default aten.eye.default aten.eye.m aten.fill.Scalar
    aten.fill_.Scalar aten.fill_.Tensor aten.flip.default aten.floor.default aten.floor_divide.default aten.fmax.default
    aten.fmin.default aten.fmod.Tensor aten.frac.default aten.fractional_max_pool2d.default
    aten.fractional_max_pool2d_backward.default aten.fractional_max_pool3d.default
    aten.fractional_max_pool3d_backward.default aten.frexp.Tensor aten.full.default aten.full_like.default
    aten.gather.default aten.gcd.default aten.ge.Scalar aten.ge.Tensor aten.gelu.default aten.gelu_backward.default
    aten.geometric_.default aten.geqrf.default aten.glu.default aten.glu_backward.default aten.gt.Scalar aten.gt.Tensor
    aten.hardshrink.default aten.hardshrink_backward.default aten.hardsigmoid.default aten.hardsigmoid_backward.default
    aten.hardswish.default aten.hardswish_backward.default aten.hardtanh.default aten.hardtanh_backward.default
    aten.hash_tensor.default aten.heaviside.default aten.histc.default aten.histogram.bin_ct aten.histogram.bins_tensor
    aten.huber_loss.default aten.huber_loss_backward.default aten.hypot.default aten.i0.default aten.igamma.default
    aten.igammac.default aten.im2col.default aten.index.Tensor aten.index_add.default aten.index_add_.default
    aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor aten.index_put.default
    aten.index_put_.default aten.index_reduce.default aten.index_select.default aten.isin.Tensor_Tensor
    aten.isinf.default aten.isnan.default aten.isneginf.default aten.isposinf.default aten.kthvalue.default
    aten.lcm.default aten.ldexp.Tensor aten.le.Scalar aten.le.Tensor aten.leaky_relu.default
    aten.leaky_relu_backward.default aten.lerp.Scalar aten.lerp.Tensor aten.lerp_.Scalar aten.lerp_.Tensor
    aten.lgamma.default aten.lift_fresh.default aten.linalg_cholesky_ex.default aten.linalg_cross.default
    aten.linalg_eig.default aten.linalg_householder_product.default aten.linalg_inv_ex.default
    aten.linalg_ldl_factor_ex.default aten.linalg_ldl_solve.default aten.linalg_lu.default
    aten.linalg_lu_factor_ex.default aten.linalg_lu_solve.default aten.linalg_matrix_exp.default
    aten.linalg_pinv.atol_rtol_tensor aten.linalg_qr.default aten.linalg_solve_triangular.default
    aten.linalg_vector_norm.default aten.linspace.Scalar_Tensor aten.linspace.Tensor_Scalar aten.linspace.Tensor_Tensor
    aten.linspace.default aten.log.default aten.log10.default aten.log1p.default aten.log2.default aten.log_.default
    aten.log_normal_.default aten.log_sigmoid_backward.default aten.log_sigmoid_forward.default aten.logaddexp.default
    aten.logaddexp2.default aten.logcumsumexp.default aten.logical_and.default aten.logical_and_.default
    aten.logical_not.default aten.logical_not_.default aten.logical_or.default aten.logical_or_.default
    aten.logical_xor.default aten.logit.default aten.logit_backward.default aten.logspace.Scalar_Tensor
    aten.logspace.Tensor_Scalar aten.logspace.Tensor_Tensor aten.logspace.default aten.logsumexp.default aten.lt.Scalar
    aten.lt.Tensor aten.lu_unpack.default aten.masked_fill.Scalar aten.masked_fill.Tensor aten.masked_fill_.Scalar
    aten.masked_scatter.default aten.masked_scatter_backward.default aten.masked_select.default aten.max.default
    aten.max.dim aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default
    aten.max_pool3d_with_indices.default aten.max_pool3d_with_indices_backward.default aten.max_unpool2d.default
    aten.max_unpool3d.default aten.maximum.default aten.maximum.out aten.mean.default aten.mean.dim aten.median.default
    aten.median.dim aten.min.default aten.min.dim aten.minimum.default aten.mish.default aten.mish_backward.default
    aten.mm.default aten.mm.out aten.mode.default aten.mse_loss.default aten.mse_loss_backward.default aten.mul.Scalar
    aten.mul.Tensor aten.mul.out aten.mul_.Scalar aten.mul_.Tensor aten.multi_margin_loss.default
    aten.multi_margin_loss_backward.default aten.multilabel_margin_loss_backward.default
    aten.multilabel_margin_loss_forward.default aten.multinomial.default aten.mv.default aten.mvlgamma.default
    aten.nan_to_num.default aten.nanmedian.default aten.nanmedian.dim aten.nansum.default aten.narrow_copy.default
    aten.native_batch_norm.default aten.native_batch_norm_backward.default aten.native_dropout_backward.default
    aten.native_group_norm.default aten.native_group_norm_backward.default aten.native_layer_norm.default
    aten.native_layer_norm_backward.default aten.ne.Scalar aten.ne.Tensor aten.neg.default aten.neg_.default
    aten.new_empty.default aten.new_empty_strided.default aten.new_full.default aten.new_ones.default
    aten.new_zeros.default aten.nextafter.default aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default
    aten.nll_loss_backward.default aten.nll_loss_forward.default aten.nonzero.default aten.nonzero_static.default
    aten.norm.ScalarOpt_dim aten.normal.Tensor_Tensor aten.normal.Tensor_float aten.normal.float_float
    aten.normal_.default aten.ones.default aten.ones_like.default aten.ormqr.default aten.permute.default
    aten.permute_copy.default aten.pixel_shuffle.default aten.pixel_unshuffle.default aten.polar.default
    aten.polygamma.default aten.pow.Scalar aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.pow_.Scalar
    aten.prod.default aten.prod.dim_int aten.put.default aten.rad2deg.default aten.rand.default aten.rand.generator
    aten.rand_like.default aten.randint.default aten.randint.low aten.randint.low_generator aten.randint_like.default
    aten.randint_like.low_dtype aten.randn.default aten.randn.generator aten.randn_like.default aten.random_.default
    aten.randperm.default aten.randperm.generator aten.reciprocal.default aten.reciprocal_.default
    aten.reflection_pad1d.default aten.reflection_pad1d_backward.default aten.reflection_pad2d.default
    aten.reflection_pad2d_backward.default aten.relu.default aten.relu_.default aten.remainder.Scalar
    aten.remainder.Tensor aten.renorm.default aten.repeat.default aten.repeat_interleave.Tensor
    aten.replication_pad1d.default aten.replication_pad1d_backward.default aten.replication_pad2d.default
    aten.replication_pad2d_backward.default aten.resize_.default aten.resize_as_.default aten.roll.default
    aten.rot90.default aten.round.decimals aten.round.default aten.rrelu_with_noise.default
    aten.rrelu_with_noise_backward.default aten.rsqrt.default aten.rsqrt_.default aten.rsub.Scalar aten.rsub.Tensor
    aten.scalar_tensor.default aten.scatter.src aten.scatter.value aten.scatter_.value aten.scatter_add.default
    aten.scatter_reduce.two aten.searchsorted.Tensor aten.segment_reduce.default aten.select.int
    aten.select_backward.default aten.select_scatter.default aten.sgn.default aten.sigmoid.default aten.sigmoid_.default
    aten.sigmoid_backward.default aten.sign.default aten.signbit.default aten.silu.default aten.silu_backward.default
    aten.sin.default aten.sinc.default aten.sinh.default aten.slice.Tensor aten.slice_backward.default
    aten.slice_scatter.default aten.smooth_l1_loss.default aten.smooth_l1_loss_backward.default
    aten.soft_margin_loss.default aten.soft_margin_loss_backward.default aten.softplus.default
    aten.softplus_backward.default aten.softshrink.default aten.softshrink_backward.default aten.sort.default
    aten.sort.stable aten.sparse_mask.default aten.sparse_sampled_addmm.default aten.special_airy_ai.default
    aten.special_bessel_j0.default aten.special_bessel_j1.default aten.special_bessel_y0.default
    aten.special_bessel_y1.default aten.special_chebyshev_polynomial_t.default
    aten.special_chebyshev_polynomial_u.default aten.special_chebyshev_polynomial_v.default
    aten.special_chebyshev_polynomial_w.default aten.special_entr.default aten.special_erfcx.default
    aten.special_hermite_polynomial_h.default aten.special_hermite_polynomial_he.default aten.special_i0e.default
    aten.special_i1.default aten.special_i1e.default aten.special_laguerre_polynomial_l.default
    aten.special_legendre_polynomial_p.default aten.special_log_ndtr.default aten.special_modified_bessel_i0.default
    aten.special_modified_bessel_i1.default aten.special_modified_bessel_k0.default
    aten.special_modified_bessel_k1.default aten.special_ndtri.default aten.special_scaled_modified_bessel_k0.default
    aten.special_scaled_modified_bessel_k1.default aten.special_shifted_chebyshev_polynomial_t.default
    aten.special_shifted_chebyshev_polynomial_u.default aten.special_shifted_chebyshev_polynomial_v.default
    aten.special_shifted_chebyshev_polynomial_w.default aten.special_spherical_bessel_j0.default
    aten.special_xlog1py.default aten.special_zeta.default aten.split.Tensor aten.split_with_sizes.default
    aten.split_with_sizes_copy.default aten.sqrt.default aten.sqrt_.default aten.squeeze.default aten.squeeze.dim
    aten.squeeze.dims aten.squeeze_.dim aten.squeeze_copy.default aten.squeeze_copy.dim aten.stack.default
    aten.std.correction aten.std_mean.correction aten.sub.Scalar aten.sub.Tensor aten.sub_.Tensor aten.sum.default
    aten.sum.dim_IntList aten.t.default aten.t_.default aten.t_copy.default aten.take.default aten.tan.default
    aten.tanh.default aten.tanh_.default aten.tanh_backward.default aten.threshold.default
    aten.threshold_backward.default aten.topk.default aten.trace.default aten.transpose.int aten.transpose_.default
    aten.transpose_copy.int aten.triangular_solve.default aten.tril.default aten.tril_.default aten.tril_indices.default
    aten.triu.default aten.triu_.default aten.triu_indices.default aten.trunc.default aten.unbind.int
    aten.unbind_copy.int aten.unfold.default aten.unfold_backward.default aten.unfold_copy.default aten.uniform_.default
    aten.unique_consecutive.default aten.unsafe_split.Tensor aten.unsqueeze.default aten.unsqueeze_.default
    aten.unsqueeze_copy.default aten.upsample_bicubic2d.default aten.upsample_bicubic2d_backward.default
    aten.upsample_bilinear2d.default aten.upsample_bilinear2d_backward.default aten.upsample_linear1d.default
    aten.upsample_linear1d_backward.default aten.upsample_nearest1d.default aten.upsample_nearest1d_backward.default
    aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default aten.upsample_trilinear3d.default
    aten.upsample_trilinear3d_backward.default aten.var.correction aten.var_mean.correction aten.vdot.default
    aten.view.default aten.view.dtype aten.view_as_complex.default aten.view_copy.default aten.where.self
    aten.xlogy.Tensor aten.zero_.default aten.zeros.default aten.zeros_like.default
    torch_nn._linear_cross_entropy_batch_chunked.default
    torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default
    """,
    "bfloat16": """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._embedding_bag.default
    aten._embedding_bag_backward.default aten._euclidean_dist.default aten._foreach_mul_.Tensor
    aten._foreach_norm.Scalar aten._local_scalar_dense.default aten._log_softmax.default
    aten._log_softmax_backward_data.default aten._native_multi_head_attention.default aten._prelu_kernel.default
    aten._prelu_kernel_backward.default aten._scaled_dot_product_flash_attention_for_cpu.default
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._softmax.default
    aten._softmax_backward_data.default aten._to_copy.default aten._transformer_encoder_layer_fwd.default
    aten._unsafe_view.default aten.abs.default aten.acos.default aten.adaptive_max_pool2d.default
    aten.adaptive_max_pool2d_backward.default aten.add.Scalar aten.add.Tensor aten.add_.Scalar aten.add_.Tensor
    aten.addmm.default aten.amax.default aten.amin.default aten.argmax.default aten.argmin.default aten.asin.default
    aten.asinh.default aten.atan.default aten.atan2.default aten.avg_pool2d.default aten.avg_pool2d_backward.default
    aten.bernoulli_.float aten.binary_cross_entropy.default aten.binary_cross_entropy_backward.default
    aten.binary_cross_entropy_with_logits.default aten.bmm.default aten.cat.default aten.ceil.default aten.celu.default
    aten.clamp.default aten.clamp_min.default aten.clamp_min_.Tensor aten.clone.default aten.col2im.default
    aten.constant_pad_nd.default aten.convolution.default aten.convolution_backward.default aten.copy_.default
    aten.cos.default aten.cosh.default aten.cumprod.default aten.cumsum.default aten.detach.default aten.digamma.default
    aten.div.Scalar aten.div.Tensor aten.div.Tensor_mode aten.div_.Scalar aten.dot.default aten.elu.default
    aten.elu_backward.default aten.embedding.default aten.embedding_dense_backward.default aten.empty_like.default
    aten.eq.Scalar aten.eq.Tensor aten.equal.default aten.erf.default aten.erfc.default aten.exp.default
    aten.exp2.default aten.expand.default aten.expm1.default aten.flip.default aten.floor.default aten.fmod.Tensor
    aten.frac.default aten.gather.default aten.ge.Scalar aten.gelu.default aten.gelu_backward.default aten.glu.default
    aten.glu_backward.default aten.grid_sampler_2d.default aten.grid_sampler_2d_backward.default aten.gt.Scalar
    aten.gt.Tensor aten.hardsigmoid.default aten.hardsigmoid_backward.default aten.hardswish.default
    aten.hardswish_backward.default aten.hardtanh.default aten.hardtanh_backward.default aten.huber_loss.default
    aten.huber_loss_backward.default aten.hypot.default aten.im2col.default aten.index.Tensor aten.index_put.default
    aten.isnan.default aten.le.Scalar aten.leaky_relu.default aten.leaky_relu_backward.default aten.lgamma.default
    aten.lift_fresh.default aten.linalg_vector_norm.default aten.log.default aten.log10.default aten.log1p.default
    aten.log2.default aten.log_sigmoid_backward.default aten.log_sigmoid_forward.default aten.logit.default
    aten.logsumexp.default aten.lt.Tensor aten.masked_fill.Scalar aten.masked_fill_.Scalar aten.max.default
    aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default aten.maximum.default
    aten.mean.default aten.mean.dim aten.median.dim aten.min.default aten.minimum.default aten.mish.default
    aten.mish_backward.default aten.mm.default aten.mse_loss.default aten.mse_loss_backward.default aten.mul.Scalar
    aten.mul.Tensor aten.mul_.Scalar aten.mul_.Tensor aten.mv.default aten.native_batch_norm.default
    aten.native_batch_norm_backward.default aten.native_group_norm.default aten.native_group_norm_backward.default
    aten.native_layer_norm.default aten.native_layer_norm_backward.default aten.neg.default aten.neg_.default
    aten.new_empty.default aten.new_zeros.default aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default
    aten.nll_loss_backward.default aten.nll_loss_forward.default aten.permute.default aten.pixel_shuffle.default
    aten.pixel_unshuffle.default aten.polygamma.default aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.prod.dim_int
    aten.reciprocal.default aten.reflection_pad2d.default aten.reflection_pad2d_backward.default aten.relu.default
    aten.remainder.Tensor aten.repeat.default aten.replication_pad2d.default aten.replication_pad2d_backward.default
    aten.roll.default aten.round.default aten.rsqrt.default aten.scatter.src aten.scatter_add.default aten.select.int
    aten.select_backward.default aten.sgn.default aten.sigmoid.default aten.sigmoid_.default
    aten.sigmoid_backward.default aten.sign.default aten.silu.default aten.silu_backward.default aten.sin.default
    aten.sinh.default aten.slice.Tensor aten.slice_backward.default aten.smooth_l1_loss.default
    aten.smooth_l1_loss_backward.default aten.softplus.default aten.softplus_backward.default aten.softshrink.default
    aten.softshrink_backward.default aten.sort.default aten.split.Tensor aten.sqrt.default aten.squeeze.dim
    aten.stack.default aten.std.correction aten.sub.Scalar aten.sub.Tensor aten.sum.default aten.sum.dim_IntList
    aten.t.default aten.tan.default aten.tanh.default aten.tanh_.default aten.tanh_backward.default
    aten.threshold_backward.default aten.topk.default aten.transpose.int aten.transpose_.default aten.trunc.default
    aten.unbind.int aten.unsafe_split.Tensor aten.unsqueeze.default aten.upsample_bicubic2d.default
    aten.upsample_bicubic2d_backward.default aten.upsample_bilinear2d.default aten.upsample_bilinear2d_backward.default
    aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default aten.var.correction aten.view.default
    aten.view.dtype aten.where.self aten.xlogy.Tensor aten.zero_.default aten.zeros_like.default
    """,
    "float16": """
    aten._to_copy.default aten.clone.default aten.detach.default
    """,
    "float64": """
    aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool2d_backward.default aten._embedding_bag.default
    aten._embedding_bag_backward.default aten._euclidean_dist.default aten._fft_r2c.default aten._foreach_mul_.Tensor
    aten._foreach_norm.Scalar aten._local_scalar_dense.default aten._log_softmax.default
    aten._log_softmax_backward_data.default aten._native_multi_head_attention.default aten._prelu_kernel.default
    aten._prelu_kernel_backward.default aten._safe_softmax.default
    aten._scaled_dot_product_flash_attention_for_cpu.default
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default aten._softmax.default
    aten._softmax_backward_data.default aten._to_copy.default aten._transformer_encoder_layer_fwd.default
    aten._unsafe_view.default aten.abs.default aten.acos.default aten.adaptive_max_pool2d.default
    aten.adaptive_max_pool2d_backward.default aten.add.Scalar aten.add.Tensor aten.add_.Scalar aten.add_.Tensor
    aten.addmm.default aten.amax.default aten.amin.default aten.argmax.default aten.argmin.default aten.asin.default
    aten.asinh.default aten.atan.default aten.atan2.default aten.avg_pool2d.default aten.avg_pool2d_backward.default
    aten.avg_pool3d.default aten.avg_pool3d_backward.default aten.bernoulli_.float aten.binary_cross_entropy.default
    aten.binary_cross_entropy_backward.default aten.binary_cross_entropy_with_logits.default aten.bmm.default
    aten.cat.default aten.ceil.default aten.celu.default aten.clamp.default aten.clamp_min.default
    aten.clamp_min_.Tensor aten.clone.default aten.col2im.default aten.constant_pad_nd.default aten.convolution.default
    aten.convolution_backward.default aten.copy_.default aten.cos.default aten.cosh.default aten.cumprod.default
    aten.cumsum.default aten.detach.default aten.diagonal.default aten.digamma.default aten.div.Scalar aten.div.Tensor
    aten.div.Tensor_mode aten.div_.Scalar aten.dot.default aten.elu.default aten.elu_backward.default
    aten.embedding.default aten.embedding_dense_backward.default aten.empty_like.default aten.eq.Scalar aten.eq.Tensor
    aten.equal.default aten.erf.default aten.erfc.default aten.exp.default aten.exp2.default aten.expand.default
    aten.expm1.default aten.flip.default aten.floor.default aten.fmod.Tensor aten.frac.default aten.gather.default
    aten.ge.Scalar aten.gelu.default aten.gelu_backward.default aten.glu.default aten.glu_backward.default
    aten.grid_sampler_2d.default aten.grid_sampler_2d_backward.default aten.gt.Scalar aten.gt.Tensor
    aten.hardsigmoid.default aten.hardsigmoid_backward.default aten.hardswish.default aten.hardswish_backward.default
    aten.hardtanh.default aten.hardtanh_backward.default aten.huber_loss.default aten.huber_loss_backward.default
    aten.hypot.default aten.im2col.default aten.index.Tensor aten.index_put.default aten.isnan.default aten.le.Scalar
    aten.leaky_relu.default aten.leaky_relu_backward.default aten.lgamma.default aten.lift_fresh.default
    aten.linalg_inv_ex.default aten.linalg_pinv.atol_rtol_tensor aten.linalg_qr.default
    aten.linalg_solve_triangular.default aten.linalg_vector_norm.default aten.log.default aten.log10.default
    aten.log1p.default aten.log2.default aten.log_sigmoid_backward.default aten.log_sigmoid_forward.default
    aten.logit.default aten.logsumexp.default aten.lt.Tensor aten.masked_fill.Scalar aten.masked_fill_.Scalar
    aten.max.default aten.max_pool2d_with_indices.default aten.max_pool2d_with_indices_backward.default
    aten.maximum.default aten.mean.default aten.mean.dim aten.median.dim aten.min.default aten.minimum.default
    aten.mish.default aten.mish_backward.default aten.mm.default aten.mse_loss.default aten.mse_loss_backward.default
    aten.mul.Scalar aten.mul.Tensor aten.mul_.Scalar aten.mul_.Tensor aten.mv.default aten.native_batch_norm.default
    aten.native_batch_norm_backward.default aten.native_group_norm.default aten.native_group_norm_backward.default
    aten.native_layer_norm.default aten.native_layer_norm_backward.default aten.neg.default aten.neg_.default
    aten.new_empty.default aten.new_zeros.default aten.nll_loss2d_backward.default aten.nll_loss2d_forward.default
    aten.nll_loss_backward.default aten.nll_loss_forward.default aten.permute.default aten.pixel_shuffle.default
    aten.pixel_unshuffle.default aten.polygamma.default aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.prod.dim_int
    aten.reciprocal.default aten.reflection_pad2d.default aten.reflection_pad2d_backward.default aten.relu.default
    aten.remainder.Tensor aten.repeat.default aten.replication_pad2d.default aten.replication_pad2d_backward.default
    aten.roll.default aten.round.default aten.rsqrt.default aten.scatter.src aten.scatter_add.default aten.select.int
    aten.select_backward.default aten.sgn.default aten.sigmoid.default aten.sigmoid_.default
    aten.sigmoid_backward.default aten.sign.default aten.silu.default aten.silu_backward.default aten.sin.default
    aten.sinh.default aten.slice.Tensor aten.slice_backward.default aten.smooth_l1_loss.default
    aten.smooth_l1_loss_backward.default aten.softplus.default aten.softplus_backward.default aten.softshrink.default
    aten.softshrink_backward.default aten.sort.default aten.split.Tensor aten.sqrt.default aten.squeeze.dim
    aten.stack.default aten.std.correction aten.sub.Scalar aten.sub.Tensor aten.sum.default aten.sum.dim_IntList
    aten.t.default aten.tan.default aten.tanh.default aten.tanh_.default aten.tanh_backward.default
    aten.threshold_backward.default aten.topk.default aten.transpose.int aten.transpose_.default aten.triu.default
    aten.trunc.default aten.unbind.int aten.uniform_.default aten.unsafe_split.Tensor aten.unsqueeze.default
    aten.upsample_bicubic2d.default aten.upsample_bicubic2d_backward.default aten.upsample_bilinear2d.default
    aten.upsample_bilinear2d_backward.default aten.upsample_nearest2d.default aten.upsample_nearest2d_backward.default
    aten.var.correction aten.view.default aten.view.dtype aten.where.self aten.xlogy.Tensor aten.zero_.default
    aten.zeros_like.default
    """,
}

KNOWN = frozenset(f"{name} {types}".strip() for types, names in KNOWN_BY_TYPES.items() for name in names.split())
