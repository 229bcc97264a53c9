// Rows of an embedding table as f32.

#include "quads.cuh"
#include "weight_element.cuh"

// Grid (rows, ceil(cols / 1024)), 256 threads. y [rows][cols]; tokens are rows of the table: row r's is tokens[r], or
// tokens[picked[r]] if `picked` is not null.
extern "C" __global__ void embed(float* y, Weight table, const unsigned* tokens, const unsigned* picked, int rows, int cols) {
    int row = blockIdx.x;
    int c = quad_column();
    if (row >= rows || c >= cols) return;
    unsigned token = tokens[picked ? picked[row] : (unsigned)row];
    store_quad(y + (long long)row * cols, c, cols, weight_quad(table, (int)token, c));
}
