// One tensor. Nothing is written where a total of the norms is not finite; the first of them is that of the group.
template <i64 LEN, bool CLIP, int LR, int CORRECTION1, int CORRECTION2, class... Totals>
DEVICE void adamw(In<u32> parameters, Out<float> weight, Out<float> first, Out<float> second, In<float> gradient,
                  float beta1, float beta2, float eps, float decay, float clip, float total, Totals... totals) {
    bool all = true;
    const float each[] = {total, totals...};
    for (float other : each) {
        all = all && is_finite(other);
    }
    if (!all) {
        return;
    }
    float lr = scalar(parameters, LR);
    float factor = CLIP ? fminf(clip / (sqrtf(total) + 1e-6f), 1.0f) : 1.0f;
    float keep = 1.0f - lr * decay, step = lr / scalar(parameters, CORRECTION1);
    float root = 1.0f / sqrtf(scalar(parameters, CORRECTION2));
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four g = load<LEN>(gradient, row, column), w = load<LEN>(weight, row, column);
        Four m = load<LEN>(first, row, column), v = load<LEN>(second, row, column);
        for (int k = 0; k < 4; ++k) {
            float clipped = factor * g.v[k];
            m.v[k] = beta1 * m.v[k] + (1.0f - beta1) * clipped;
            v.v[k] = beta2 * v.v[k] + (1.0f - beta2) * clipped * clipped;
            w.v[k] = w.v[k] * keep - step * m.v[k] / (sqrtf(v.v[k]) * root + eps);
        }
        store<LEN>(weight, row, column, w);
        store<LEN>(first, row, column, m);
        store<LEN>(second, row, column, v);
    });
}
