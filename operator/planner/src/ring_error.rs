//! Errors of the choice of a ring: what is wrong, of which device, with its value and a remedy.

use hearth_crds::format_bytes;

/// Why no ring was chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RingError {
    /// There is nothing to choose among.
    #[error("the ring has no {what}: give at least one")]
    None {
        /// "device" or "layer".
        what: &'static str,
    },
    /// More than the choice is made for.
    #[error("the ring has {count} {what}s, more than {max}: leave some out")]
    TooMany {
        /// "device" or "layer".
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        max: usize,
    },
    /// A value is no number or out of range.
    #[error("{of}: {what} is {value} {unit}, not {range}: measure it again, or leave {of} out")]
    BadValue {
        /// The device, or part of the model, that has it.
        of: String,
        /// What it is.
        what: String,
        /// How much it is.
        value: f64,
        /// Its unit.
        unit: String,
        /// What it may be.
        range: &'static str,
    },
    /// A device has no room for any layer.
    #[error(
        "{device}: buffers and output head take {} of its {memory}'s {}: free memory on it, or leave it out",
        format_bytes(*needed_bytes), format_bytes(*memory_bytes)
    )]
    FullBefore {
        /// The device.
        device: String,
        /// Which of its memories.
        memory: &'static str,
        /// Bytes that are needed before any layer.
        needed_bytes: u64,
        /// Bytes that there are.
        memory_bytes: u64,
    },
    /// A device's times do not match the model.
    #[error(
        "{device}: {entries} times of layers on {on}, but the model has {layers} layers: give one for each"
    )]
    TimesMissing {
        /// The device.
        device: String,
        /// Which of its processors.
        on: String,
        /// Times that it has.
        entries: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A device's links do not match the devices.
    #[error("{device}: {entries} links for {devices} devices: give one to each, itself included")]
    LinksMissing {
        /// The device.
        device: String,
        /// Links that it has.
        entries: usize,
        /// Devices of the problem.
        devices: usize,
    },
    /// A layer's bytes contradict each other.
    #[error("layer {index} {problem}: read the model's facts again")]
    BadLayer {
        /// Its index.
        index: usize,
        /// What is wrong.
        problem: &'static str,
    },
    /// No split of the layers fits.
    #[error(
        "no split of {} of weights and KV fits: devices that may not read weights from disk at each token have {} of \
         memory, GPUs {}, and the others' memory must hold the KV of the rest: free memory, add a device or a faster \
         disk, or use a smaller model",
        format_bytes(*needed_bytes), format_bytes(*memory_bytes), format_bytes(*gpu_bytes)
    )]
    NoRoom {
        /// Bytes of the layers' weights and KV.
        needed_bytes: u64,
        /// Bytes of memory that layers may take of devices on which all of theirs must fit.
        memory_bytes: u64,
        /// Bytes of GPUs that layers may take.
        gpu_bytes: u64,
    },
}
