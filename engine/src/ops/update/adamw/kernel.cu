struct Updated {
    Out<float> weight, first, second;
    In<float> gradient;
    i64 len, first_block;
};

// Tensors of a group. Nothing is written if a total is not finite; the first is that of the group.
template <bool CLIP, int LR, int CORRECTION1, int CORRECTION2, int TOTALS, int TENSORS>
DEVICE void adamw(In<u32> parameters, float beta1, float beta2, float eps, float decay, float clip,
                  const float (&totals)[TOTALS], const Updated (&tensors)[TENSORS]) {
    if (!all_finite(totals)) {
        return;
    }
    float lr = scalar(parameters, LR);
    float factor = CLIP ? fminf(clip / (sqrtf(totals[0]) + 1e-6f), 1.0f) : 1.0f;
    float keep = 1.0f - lr * decay, step = lr / scalar(parameters, CORRECTION1);
    float root = 1.0f / sqrtf(scalar(parameters, CORRECTION2));
    each_share(tensors, [&](const Updated &tensor, i64 at) {
        i64 len = tensor.len;
        Four g = load_until(tensor.gradient, at, len), w = load_until(tensor.weight, at, len);
        Four m = load_until(tensor.first, at, len), v = load_until(tensor.second, at, len);
        for (int k = 0; k < 4; ++k) {
            float clipped = factor * g.v[k];
            m.v[k] = beta1 * m.v[k] + (1.0f - beta1) * clipped;
            v.v[k] = beta2 * v.v[k] + (1.0f - beta2) * clipped * clipped;
            w.v[k] = w.v[k] * keep - step * m.v[k] / (sqrtf(v.v[k]) * root + eps);
        }
        store_until(tensor.weight, at, len, w);
        store_until(tensor.first, at, len, m);
        store_until(tensor.second, at, len, v);
    });
}
