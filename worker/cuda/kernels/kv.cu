// Records of the paged cache: written from f32 rows and read as such, and copied out and in as bytes. KV_TYPE: 0 f32, 1 bf16.
//
// A record is one token's keys of all heads, then its values of all heads; `offsets` are the records' byte offsets in the layer.

#include "kv.cuh"

// Grid (rows, ceil((key_cols + value_cols) / 1024)), 256 threads. values may be null when value_cols is 0.
extern "C" __global__ void kv_append(
    unsigned char* layer, const float* keys, const float* values, const long long* offsets, int rows, int key_cols, int value_cols) {
    int row = blockIdx.x;
    if (row >= rows) return;
    Element* record = reinterpret_cast<Element*>(layer + offsets[row]);
    const float* key = keys + (long long)row * key_cols;
    const float* value = values + (long long)row * value_cols;
    int start = quad_column();
    int cols = key_cols + value_cols;
    if ((key_cols | value_cols) % 4 == 0) {
        if (start >= cols) return;
        const float* from = start < key_cols ? key + start : value + start - key_cols;
        store_elements(record + start, *reinterpret_cast<const float4*>(from));
        return;
    }
    for (int c = start; c < min(start + 4, cols); ++c) {
        store_element(record + c, c < key_cols ? key[c] : value[c - key_cols]);
    }
}

// The same for keys and values of expanded latents: of a head's columns of product [rows][heads][nope + v] the first are its
// key's, before the columns from `rank` on of latents [rows][rank + rope], and the others its value's.
extern "C" __global__ void kv_append_expanded(
    unsigned char* layer, const float* product, const float* latents, const long long* offsets, int rows, int heads, int nope, int v,
    int rank, int rope) {
    int row = blockIdx.x;
    if (row >= rows) return;
    Element* record = reinterpret_cast<Element*>(layer + offsets[row]);
    const float* of_heads = product + (long long)row * heads * (nope + v);
    const float* rotated = latents + (long long)row * (rank + rope) + rank;
    auto source = [&](int c) {
        int key = nope + rope, keys = heads * key;
        if (c >= keys) return of_heads + (c - keys) / v * (nope + v) + nope + (c - keys) % v;
        int of_key = c % key;
        return of_key < nope ? of_heads + c / key * (nope + v) + of_key : rotated + of_key - nope;
    };
    int start = quad_column(), cols = heads * (nope + rope + v);
    if ((nope | v | rank | rope) % 4 == 0) {
        if (start < cols) store_elements(record + start, *reinterpret_cast<const float4*>(source(start)));
        return;
    }
    for (int c = start; c < min(start + 4, cols); ++c) store_element(record + c, *source(c));
}

// Grid (tokens, ceil(cols / 1024)), 256 threads: out [tokens][cols] are the records' elements.
extern "C" __global__ void kv_rows(float* out, const unsigned char* layer, const long long* offsets, int tokens, int cols) {
    int token = blockIdx.x;
    int start = quad_column();
    if (token >= tokens) return;
    const Element* record = reinterpret_cast<const Element*>(layer + offsets[token]);
    float* row = out + (long long)token * cols;
    for (int c = start; c < min(start + 4, cols); ++c) row[c] = load_element(record + c);
}

// Copies one record with the whole block, 16 bytes at a time if records are aligned for it; every record has an even length.
__device__ __forceinline__ void copy_record(unsigned char* to, const unsigned char* from, int record_bytes) {
    if (record_bytes % 16 == 0) {
        for (int i = 16 * threadIdx.x; i < record_bytes; i += 16 * blockDim.x) {
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
        }
        return;
    }
    for (int i = 2 * threadIdx.x; i < record_bytes; i += 2 * blockDim.x) {
        *reinterpret_cast<unsigned short*>(to + i) = *reinterpret_cast<const unsigned short*>(from + i);
    }
}

// Grid tokens, 128 threads: copies the records to out [tokens][record_bytes].
extern "C" __global__ void kv_gather(
    unsigned char* out, const unsigned char* layer, const long long* offsets, int tokens, int record_bytes) {
    int token = blockIdx.x;
    if (token >= tokens) return;
    copy_record(out + (long long)token * record_bytes, layer + offsets[token], record_bytes);
}

// Grid tokens, 128 threads: the inverse of kv_gather.
extern "C" __global__ void kv_scatter(
    unsigned char* layer, const unsigned char* in, const long long* offsets, int tokens, int record_bytes) {
    int token = blockIdx.x;
    if (token >= tokens) return;
    copy_record(layer + offsets[token], in + (long long)token * record_bytes, record_bytes);
}
