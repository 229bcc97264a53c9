// Between the compressed projections of latent attention and the queries' own: both latents are normalised, and the latent of keys
// and values is stored in the paged cache with the rotated key. The bits are those of columns.cu, rms_norm.cu, rope.cu and
// kv.cu one after the other.

#include "kv.cuh"
#include "norm_row.cuh"
#include "rotate.cuh"

// The row's latent: all threads of the block call it.
__device__ __forceinline__ void cache_latent(Element* record, const Rows& x, long long at, const float* weight, float eps, int rank, int cols) {
    bool aligned = (rank | cols) % 4 == 0;
    int width = rank <= WARP_COLS ? 32 : NORM_THREADS, first = (int)threadIdx.x < width ? 4 * threadIdx.x : rank;
    float squares = 0.0f;
    for (int c = first; c < rank; c += 4 * width) add_squares(squares, row_quad(x, at, c, rank, aligned));
    float total = width == 32 ? warp_sum(squares) : block_sum(squares);
    float inverse = inverse_norm(total, eps, rank);
    for (int c = first; c < rank; c += 4 * width)
        store_elements(record, c, rank, aligned, normed(row_quad(x, at, c, rank, aligned), inverse, load_quad(weight, c, rank)));
}

// Grid (rows, 1 or 2), 256 threads. The first row of blocks takes kv_a [rows][rank + rotated], and
// stores it at byte offsets[row] of the layer, or nowhere if that is negative; the first 2 * pairs of the rotated columns are
// rotated. The second takes q_a [rows][q_rank]; its norm goes to q, and to terms as split.cu writes them.
extern "C" __global__ void cache_latents(
    float* q, void* terms, float* scales, unsigned char* layer, Rows kv_a, Rows q_a, const float* kv_norm, const float* q_norm, float eps,
    const unsigned* positions, const float* inv_freq, float magnitude, int interleaved, const long long* offsets, int rows, int rank,
    int rotated, int pairs, int q_rank, int padded) {
    int row = blockIdx.x;
    if (blockIdx.y == 1) {
        bool by_warp = q_rank <= WARP_COLS;
        if (by_warp && threadIdx.x >= 32) return;
        norm_group<false>({q, terms, scales, rows, padded}, nullptr, q_a, {}, q_norm, eps, row, q_rank, threadIdx.x, by_warp ? 32 : NORM_THREADS);
        return;
    }
    if (offsets[row] < 0) return;
    Element* record = reinterpret_cast<Element*>(layer + offsets[row]);
    int cols = rank + rotated;
    long long at = (long long)row * cols;
    cache_latent(record, kv_a, at, kv_norm, eps, rank, cols);
    for (int i = threadIdx.x; i < rotated - pairs; i += NORM_THREADS) {
        if (i >= pairs) {
            store_element(record + rank + pairs + i, row_value(kv_a, at, rank + pairs + i));
            continue;
        }
        int first = rank + first_of_pair(i, interleaved != 0), second = rank + second_of_pair(i, pairs, interleaved != 0);
        float a = row_value(kv_a, at, first), b = row_value(kv_a, at, second);
        rotate(a, b, turn_of(positions[row], inv_freq[i], magnitude));
        store_element(record + first, a);
        store_element(record + second, b);
    }
}
