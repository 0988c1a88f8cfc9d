// A block for each batch row. A thread has some elements of the matrix.
template <i64 POSITIONS, int COLUMNS> DEVICE void gram_penalty(In<float> phi, Out<float> gram, Out<float> norms, Out<float> parts) {
    const int elements = COLUMNS * COLUMNS;
    i64 first = (i64)blockIdx.x * elements, row = (i64)blockIdx.x * COLUMNS;
    for (int at = threadIdx.x; at < elements; at += 256) {
        i64 from = (i64)blockIdx.x * POSITIONS * COLUMNS;
        float sum = 0.0f;
        for (i64 t = 0; t < POSITIONS; ++t) {
            sum = fmaf(phi[from + t * COLUMNS + at / COLUMNS], phi[from + t * COLUMNS + at % COLUMNS], sum);
        }
        gram[first + at] = sum;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < COLUMNS; k += 256) {
        float found = sqrtf(gram[first + k * COLUMNS + k]);
        norms[row + k] = found < 1e-12f ? 1e-12f : found;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int at = threadIdx.x; at < elements; at += 256) {
        float cosine = gram[first + at] / norms[row + at / COLUMNS] / norms[row + at % COLUMNS];
        gram[first + at] = cosine;
        float rest = cosine - (at / COLUMNS == at % COLUMNS ? 1.0f : 0.0f);
        sum = fmaf(rest, rest, sum);
    }
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
    }
}

// factor is 4 / elements of all matrices.
template <i64 LEN, i64 POSITIONS, int COLUMNS, bool ADD>
DEVICE void gram_penalty_grad(In<float> phi, In<float> gram, In<float> norms, In<float> up, Out<float> out, float factor) {
    each_thread<LEN>([&](i64 at) {
        i64 b = at / (POSITIONS * COLUMNS), row = at / COLUMNS * COLUMNS;
        int k = (int)(at % COLUMNS);
        i64 of_gram = b * COLUMNS * COLUMNS;
        float norm = norms[b * COLUMNS + k], q = phi[at] / norm, p = -q, dot = -gram[of_gram + k * COLUMNS + k];
        for (int other = 0; other < COLUMNS; ++other) {
            float cosine = gram[of_gram + other * COLUMNS + k];
            p = fmaf(phi[row + other] / norms[b * COLUMNS + other], cosine, p);
            dot = fmaf(cosine, cosine, dot);
        }
        give<ADD>(out, at, factor * up[0] * (p - (norm > 1e-12f ? q * dot : 0.0f)) / norm);
    });
}
