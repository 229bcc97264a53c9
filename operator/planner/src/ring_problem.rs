//! What a ring of devices is asked to do: the devices with their measured rates, the layers with their real bytes, the
//! links, and the prompt.
//!
//! All rates come from measurements; the caller turns them into milliseconds a layer and device. The first device is the
//! head: it embeds tokens, has the output head, and its layers come first.

use crate::ring_error::RingError;

/// Most devices of a ring: the choice tries each set of them, or leaves out one after the other.
pub const MAX_DEVICES: usize = 16;
/// Most layers of a model.
pub const MAX_LAYERS: usize = 512;

/// A model to split among devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// The devices; the first is the head.
    pub devices: Vec<Device>,
    /// The model's layers, in order.
    pub layers: Vec<Layer>,
    /// Embedding and output head, on the first device.
    pub head: Head,
    /// `links[from][to]`; a device's link to itself is not read.
    pub links: Vec<Vec<Link>>,
    /// Bytes of weights that a device must have room for beside its KV where not all of its weights stay in memory: they pass
    /// through so much of it.
    pub window_bytes: u64,
    /// Bytes that a token's hidden state takes between two devices.
    pub hidden_bytes: u64,
    /// The prompt whose time to first token is predicted.
    pub prompt: Prompt,
}

/// A machine, or a part of one, that may get layers: of the planner's rings, the CPUs of a node or one of its GPUs, since
/// each process has one backend. A GPU is then a device whose layers must fit, its memory is the device's, and its copies
/// are in its links.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name in errors and explanations.
    pub name: String,
    /// Bytes of memory for weights, KV and buffers; what other programs use is not in it.
    pub memory_bytes: u64,
    /// Of these, bytes of the buffers for computation (the paper's `c^cpu`).
    pub buffer_bytes: u64,
    /// Read bandwidth of the disk with the weights, through mapped pages, in GB/s.
    pub disk_read_gbps: f64,
    /// Milliseconds to map a GB of weights that were read, and to unmap others for them.
    pub map_ms_per_gb: f64,
    /// Whether no weights may be read at each token, because the disk is too slow or the memory is a GPU's: then all of the
    /// device's layers must fit (the paper's set `M4`).
    pub must_fit: bool,
    /// Times of the layers on its CPUs, or on what it is.
    pub cpus: LayerTimes,
    /// Its GPU, if one process computes on both, as the paper's do.
    pub gpu: Option<Gpu>,
}

impl Device {
    /// Times on its GPU, if it has one, and on its CPUs.
    pub(crate) fn times(&self) -> impl Iterator<Item = &LayerTimes> {
        let gpu = self.gpu.iter().map(|gpu| &gpu.times);
        gpu.chain([&self.cpus])
    }
}

/// A device's GPU. Its layers come first in each window, and all of them stay in its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Bytes of its memory for weights, KV and buffers.
    pub memory_bytes: u64,
    /// Of these, bytes of the buffers for computation (the paper's `c^gpu`).
    pub buffer_bytes: u64,
    /// Times of the layers on it.
    pub times: LayerTimes,
    /// The link between it and the device's memory, which hidden states cross twice in each window with layers on it.
    pub copy: Link,
}

/// Times of each of the model's layers on one processor, in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerTimes {
    /// Of one token with the weights in memory: reads of the layer's active weights and of its KV, arithmetic, and
    /// overhead.
    pub token_ms: Vec<f64>,
    /// Of each token of a prompt, with the weights in memory: what its full flights take, each the longer of reads and
    /// arithmetic, and overhead, divided by their tokens. A flight takes no less than one token does.
    pub prompt_token_ms: Vec<f64>,
}

/// Bytes of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Of its weights as stored.
    pub stored_bytes: u64,
    /// Of the weights that one token reads: all of a dense layer's, the chosen experts' and the rest of a layer with experts.
    pub read_bytes: u64,
    /// Of these, bytes of chosen experts, which are known only when the layer runs and cannot be read ahead.
    pub routed_bytes: u64,
    /// Of its KV for the whole context.
    pub kv_bytes: u64,
}

impl Layer {
    /// Bytes that each token reads, whatever it chooses.
    pub(crate) fn dense_bytes(&self) -> u64 {
        self.read_bytes - self.routed_bytes
    }

    /// Bytes of its routed experts, as stored: all that a token reads a part of by choice.
    pub(crate) fn expert_bytes(&self) -> u64 {
        match self.routed_bytes {
            0 => 0,
            _ => self.stored_bytes - self.dense_bytes(),
        }
    }
}

/// Embedding and output head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Bytes of the output head, which stay in the first device's memory.
    pub stored_bytes: u64,
    /// Bytes of the embedding. They take memory only where all weights are in it, which they are on a device whose layers must
    /// fit; elsewhere it may be mapped, and tokens read rows of it (the paper's `b_i/V`, which is left out).
    pub embedding_bytes: u64,
    /// Milliseconds of embedding, output head and sampling for one token.
    pub token_ms: f64,
}

/// A way for bytes from one place to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Milliseconds until the first byte arrives.
    pub latency_ms: f64,
    /// Bandwidth in GB/s.
    pub gbps: f64,
}

impl Link {
    /// Milliseconds until all of `bytes` have arrived.
    pub fn ms(&self, bytes: f64) -> f64 {
        self.latency_ms + bytes / self.gbps / 1e6
    }
}

/// A prompt, prefilled in chunks, each of which is a pass: it ends before the next one begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: u32,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Most tokens of a flight: those of a chunk follow each other through the ring, so that devices compute at the same time.
    pub flight_tokens: u32,
}

impl Problem {
    /// Milliseconds of one token's hidden state from a device to another; 0 to itself.
    pub(crate) fn hop_ms(&self, from: usize, to: usize, tokens: u32) -> f64 {
        match from == to {
            true => 0.0,
            false => self.links[from][to].ms(self.hidden_bytes as f64 * f64::from(tokens)),
        }
    }

    /// Milliseconds of `tokens` hidden states to a GPU and back.
    pub(crate) fn copies_ms(&self, gpu: &Gpu, tokens: u32) -> f64 {
        2.0 * gpu.copy.ms(self.hidden_bytes as f64 * f64::from(tokens))
    }

    /// Bytes of a device's memory that are taken before any layer (the paper's `b^cio`, equation 34).
    pub(crate) fn fixed_bytes(&self, device: usize) -> u64 {
        let head = match (device, self.devices[device].must_fit) {
            (0, true) => self.head.stored_bytes + self.head.embedding_bytes,
            (0, false) => self.head.stored_bytes,
            _ => 0,
        };
        self.devices[device].buffer_bytes + head
    }

    /// Bytes of a device's memory for the weights and KV of layers.
    pub(crate) fn room_bytes(&self, device: usize) -> u64 {
        let memory = self.devices[device].memory_bytes;
        memory.saturating_sub(self.fixed_bytes(device))
    }

    /// Bytes of a device's GPU for the weights and KV of layers; 0 without one.
    pub(crate) fn gpu_room_bytes(&self, device: usize) -> u64 {
        let gpu = self.devices[device].gpu.as_ref();
        gpu.map_or(0, |gpu| gpu.memory_bytes.saturating_sub(gpu.buffer_bytes))
    }

    /// Bytes of a device's memory for KV beside what weights pass through; `None` where all weights must fit.
    fn passing_room_bytes(&self, device: usize) -> Option<u64> {
        let room_bytes = self.room_bytes(device).checked_sub(self.window_bytes);
        room_bytes.filter(|_| !self.devices[device].must_fit)
    }

    /// The end of the layers from `first` on that a device has room for, at most, those of its GPU first, whose end comes first.
    pub(crate) fn end_by_room(&self, device: usize, first: usize) -> (usize, usize) {
        let end = |first: usize, room_bytes: u64, of: fn(&Layer) -> u64| {
            let mut left_bytes = room_bytes;
            let fits = |layer: &&Layer| {
                let left = left_bytes.checked_sub(of(layer));
                left_bytes = left.unwrap_or(left_bytes);
                left.is_some()
            };
            first + self.layers[first..].iter().take_while(fits).count()
        };
        let whole = |layer: &Layer| layer.stored_bytes + layer.kv_bytes;
        let on_gpu = end(first, self.gpu_room_bytes(device), whole);
        let on_cpus = end(on_gpu, self.room_bytes(device), whole);
        let passing = self.passing_room_bytes(device);
        let passing = passing.map_or(on_gpu, |bytes| end(on_gpu, bytes, |layer| layer.kv_bytes));
        (on_gpu, on_cpus.max(passing))
    }

    /// Whether some ring may have room, by what each device has: `false` is certain, `true` is not, unless all layers are alike.
    pub(crate) fn may_have_room(&self) -> bool {
        let layers = self.layers.iter();
        let mut bytes: Vec<u64> = layers
            .map(|layer| layer.stored_bytes + layer.kv_bytes)
            .collect();
        let mut kv_bytes: Vec<u64> = self.layers.iter().map(|layer| layer.kv_bytes).collect();
        for bytes in [&mut bytes, &mut kv_bytes] {
            bytes.sort_unstable();
        }
        // The smallest layers are the most that fit.
        let most = |sizes: &[u64], room_bytes: u64| {
            let sums = sizes.iter().scan(0_u64, |sum, bytes| {
                *sum = sum.saturating_add(*bytes);
                Some(*sum)
            });
            sums.take_while(|sum| *sum <= room_bytes).count()
        };
        let (mut rooms, mut held, mut may_overflow) = (Vec::new(), 0, false);
        for device in 0..self.devices.len() {
            let (room_bytes, gpu_bytes) = (self.room_bytes(device), self.gpu_room_bytes(device));
            let passing = self.passing_room_bytes(device);
            may_overflow |= passing.is_some();
            let passing = passing.map_or(0, |room_bytes| most(&kv_bytes, room_bytes));
            held += most(&bytes, room_bytes).max(passing) + most(&bytes, gpu_bytes);
            rooms.extend([(room_bytes, passing), (gpu_bytes, 0)]);
            if held == 0 {
                // The head has a layer in any ring.
                return false;
            }
        }
        let room_bytes: u64 = rooms.iter().map(|(bytes, _)| bytes).sum();
        let is_short = !may_overflow && bytes.iter().sum::<u64>() > room_bytes;
        if held < self.layers.len() || is_short {
            return false;
        }
        // For each size, all layers that are at least as large must be somewhere: whole, or as many as pass through.
        bytes.reverse();
        let is_room_for = |(index, &bytes): (usize, &u64)| {
            let held = rooms
                .iter()
                .map(|(room, passing)| (room / bytes.max(1)).max(*passing as u64));
            held.sum::<u64>() > index as u64
        };
        bytes.iter().enumerate().all(is_room_for)
    }

    /// The share of the routed experts of all layers that one token chooses, by bytes; 1 without any.
    pub(crate) fn chosen_share(&self) -> f64 {
        let sum = |of: fn(&Layer) -> u64| self.layers.iter().map(of).sum::<u64>();
        match sum(Layer::expert_bytes) {
            0 => 1.0,
            experts => sum(|layer| layer.routed_bytes) as f64 / experts as f64,
        }
    }

    /// Checks all that the other functions rely on.
    ///
    /// # Errors
    ///
    /// The first value that is missing, no number, or out of range, with the device that has it and a remedy.
    pub fn check(&self) -> Result<(), RingError> {
        for (what, count, max) in [
            ("device", self.devices.len(), MAX_DEVICES),
            ("layer", self.layers.len(), MAX_LAYERS),
        ] {
            if count == 0 {
                return Err(RingError::None { what });
            }
            if count > max {
                return Err(RingError::TooMany { what, count, max });
            }
        }
        self.check_model()?;
        for device in 0..self.devices.len() {
            self.check_device(device)?;
        }
        self.check_links()
    }

    fn check_model(&self) -> Result<(), RingError> {
        for (index, layer) in self.layers.iter().enumerate() {
            let problem = if layer.stored_bytes == 0 {
                "stores no bytes"
            } else if layer.stored_bytes.max(layer.kv_bytes) as f64 > MAX_VALUE {
                "has more bytes than any"
            } else if layer.read_bytes > layer.stored_bytes {
                "is read more than once by a token"
            } else if layer.routed_bytes > layer.read_bytes {
                "has more bytes of chosen experts than a token reads"
            } else {
                continue;
            };
            return Err(RingError::BadLayer { index, problem });
        }
        let head = Value("output head", "time of a token", self.head.token_ms, "ms");
        head.not_negative()?;
        for (what, tokens) in [
            ("prompt", self.prompt.tokens),
            ("chunk", self.prompt.chunk_tokens),
            ("flight", self.prompt.flight_tokens),
        ] {
            Value(what, "length", f64::from(tokens), "tokens").positive()?;
        }
        Value("hidden state", "size", self.hidden_bytes as f64, "B").positive()
    }

    fn check_device(&self, index: usize) -> Result<(), RingError> {
        let device = &self.devices[index];
        let name = &*device.name;
        Value(name, "memory", device.memory_bytes as f64, "B").positive()?;
        let needed_bytes = self.fixed_bytes(index);
        if needed_bytes >= device.memory_bytes {
            return Err(RingError::FullBefore {
                device: name.to_owned(),
                memory: "memory",
                needed_bytes,
                memory_bytes: device.memory_bytes,
            });
        }
        Value(name, "disk read rate", device.disk_read_gbps, "GB/s").positive()?;
        Value(name, "time to map a GB", device.map_ms_per_gb, "ms").not_negative()?;
        self.check_times(name, "its CPUs", &device.cpus)?;
        let Some(gpu) = &device.gpu else {
            return Ok(());
        };
        Value(name, "GPU memory", gpu.memory_bytes as f64, "B").positive()?;
        self.check_times(name, "its GPU", &gpu.times)?;
        check_link(name, "copies to its GPU", &gpu.copy)
    }

    fn check_times(&self, name: &str, on: &str, times: &LayerTimes) -> Result<(), RingError> {
        for (kind, values) in [
            ("a token", &times.token_ms),
            ("a prompt's token", &times.prompt_token_ms),
        ] {
            if values.len() != self.layers.len() {
                return Err(RingError::TimesMissing {
                    device: name.to_owned(),
                    on: on.to_owned(),
                    entries: values.len(),
                    layers: self.layers.len(),
                });
            }
            for (layer, ms) in values.iter().enumerate() {
                let what = format!("time of {kind} in layer {layer} on {on}");
                Value(name, &what, *ms, "ms").positive()?;
            }
        }
        Ok(())
    }

    fn check_links(&self) -> Result<(), RingError> {
        let count = self.devices.len();
        for (from, device) in self.devices.iter().enumerate() {
            let links = self.links.get(from).map_or(&[][..], Vec::as_slice);
            if links.len() != count || self.links.len() != count {
                return Err(RingError::LinksMissing {
                    device: device.name.clone(),
                    entries: links.len(),
                    devices: count,
                });
            }
            for (to, link) in links.iter().enumerate().filter(|(to, _)| *to != from) {
                let what = format!("link to {}", self.devices[to].name);
                check_link(&device.name, &what, link)?;
            }
        }
        Ok(())
    }
}

fn check_link(name: &str, what: &str, link: &Link) -> Result<(), RingError> {
    Value(name, &format!("latency of {what}"), link.latency_ms, "ms").not_negative()?;
    Value(name, &format!("bandwidth of {what}"), link.gbps, "GB/s").positive()
}

/// Largest number that a rate or time may be: far above any, and small enough that sums stay finite.
const MAX_VALUE: f64 = 1e15;

/// A measured value: whose, what, how much, in what unit.
struct Value<'a>(&'a str, &'a str, f64, &'a str);

impl Value<'_> {
    fn positive(&self) -> Result<(), RingError> {
        self.check(self.2 > 0.0, "above 0")
    }

    fn not_negative(&self) -> Result<(), RingError> {
        self.check(self.2 >= 0.0, "at least 0")
    }

    /// `NaN` is in no range, so it never is `in_range`.
    fn check(&self, in_range: bool, range: &'static str) -> Result<(), RingError> {
        if in_range && self.2 <= MAX_VALUE {
            return Ok(());
        }
        Err(RingError::BadValue {
            of: self.0.to_owned(),
            what: self.1.to_owned(),
            value: self.2,
            unit: self.3.to_owned(),
            range,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usable() -> Problem {
        let layer = Layer {
            stored_bytes: 100,
            read_bytes: 100,
            routed_bytes: 0,
            kv_bytes: 1,
        };
        let times = LayerTimes {
            token_ms: vec![1.0; 3],
            prompt_token_ms: vec![0.1; 3],
        };
        let link = Link {
            latency_ms: 0.2,
            gbps: 1.0,
        };
        let device = |name: &str| Device {
            name: name.to_owned(),
            memory_bytes: 1000,
            buffer_bytes: 10,
            disk_read_gbps: 1.0,
            map_ms_per_gb: 20.0,
            must_fit: false,
            cpus: times.clone(),
            gpu: None,
        };
        let mut devices = vec![device("desk"), device("nas")];
        devices[1].gpu = Some(Gpu {
            memory_bytes: 500,
            buffer_bytes: 10,
            times: times.clone(),
            copy: link,
        });
        Problem {
            devices,
            layers: vec![layer; 3],
            head: Head {
                stored_bytes: 10,
                embedding_bytes: 0,
                token_ms: 0.5,
            },
            links: vec![vec![link; 2]; 2],
            window_bytes: 0,
            hidden_bytes: 64,
            prompt: Prompt {
                tokens: 10,
                chunk_tokens: 4,
                flight_tokens: 4,
            },
        }
    }

    /// What a change makes of the check.
    fn error_after(change: impl FnOnce(&mut Problem)) -> String {
        let mut problem = usable();
        change(&mut problem);
        problem.check().unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_device_the_value_and_a_remedy() {
        assert_eq!(usable().check(), Ok(()));
        let nas = |change: fn(&mut Device)| error_after(|p| change(&mut p.devices[1]));
        assert_eq!(
            nas(|device| device.memory_bytes = 0),
            "nas: memory is 0 B, not above 0: measure it again, or leave nas out"
        );
        assert_eq!(
            nas(|device| device.disk_read_gbps = f64::NAN),
            "nas: disk read rate is NaN GB/s, not above 0: measure it again, or leave nas out"
        );
        assert_eq!(
            nas(|device| device.cpus.token_ms[2] = 0.0),
            "nas: time of a token in layer 2 on its CPUs is 0 ms, not above 0: measure it again, or leave nas out"
        );
        assert_eq!(
            nas(|device| device.buffer_bytes = 1000),
            "nas: buffers and output head take 1000 B of its memory's 1000 B: free memory on it, or leave it out"
        );
        let gpu = nas(|device| {
            if let Some(gpu) = &mut device.gpu {
                gpu.times.prompt_token_ms.pop();
            }
        });
        assert_eq!(
            gpu,
            "nas: 2 times of layers on its GPU, but the model has 3 layers: give one for each"
        );
        let link = error_after(|p| p.links[0][1].gbps = f64::INFINITY);
        assert!(
            link.starts_with("desk: bandwidth of link to nas is inf GB/s"),
            "{link}"
        );
        let links = error_after(|p| p.links[1].clear());
        assert!(links.starts_with("nas: 0 links for 2 devices"), "{links}");
    }

    #[test]
    fn errors_name_what_of_the_model_is_wrong() {
        let none = error_after(|p| p.devices.clear());
        assert_eq!(none, "the ring has no device: give at least one");
        let many = error_after(|p| p.devices = vec![p.devices[0].clone(); MAX_DEVICES + 1]);
        assert_eq!(
            many,
            "the ring has 17 devices, more than 16: leave some out"
        );
        let layer = error_after(|p| p.layers[1].read_bytes = 101);
        assert!(
            layer.starts_with("layer 1 is read more than once"),
            "{layer}"
        );
        let chunk = error_after(|p| p.prompt.chunk_tokens = 0);
        assert!(chunk.starts_with("chunk: length is 0 tokens"), "{chunk}");
        let head = error_after(|p| p.head.token_ms = -1.0);
        assert!(
            head.starts_with("output head: time of a token is -1 ms"),
            "{head}"
        );
    }
}
