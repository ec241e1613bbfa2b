// `decoder_layers.cu` on a CPU.
#include "emulated.h"

// One behind the other, as they are compiled for a GPU.
#include "layers_ring.h"
#include "layers_products.h"
#include "layers_attention.h"
#include "layers_combine.h"
#include "decoder_layers.cu"

static Round emulated_round;

static void emulated_kernel(void) { decoder_layers(emulated_round); }

void emulate_decoder_layers(const Round *round, int blocks) {
    emulated_round = *round;
    emulate(emulated_kernel, blocks, THREADS);
}
