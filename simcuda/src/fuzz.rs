//! Fuzzing of what the simulated driver reads: topologies, and plans of faults. How the tests are run stands in the
//! engine's `src/fuzz.rs`.

#[path = "../../src/fuzz/bytes.rs"]
mod bytes;

use crate::fault::Faults;
use crate::topology::Topology;
use bytes::Bytes;

#[test]
fn topologies() {
    let shipped = ["beluga", "narval", "dgx1-v100", "hgx-h200"].map(|name| {
        let path = format!("{}/topologies/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("a topology that is shipped")
    });
    bolero::check!(name = "topologies")
        .with_iterations(300)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let which = usize::from(input.byte() % 4);
            match Topology::parse("sample", &input.text(&shipped[which])) {
                Ok(topology) => {
                    let gpus = topology.gpu.count;
                    let pairs = (0..gpus).flat_map(|a| (0..gpus).map(move |b| (a, b)));
                    for (a, b) in pairs.filter(|(a, b)| a != b) {
                        let _ = (topology.link_of(a, b), topology.ancestor(a, b));
                    }
                    (0..gpus).for_each(|gpu| {
                        let above = topology.above(gpu).count();
                        assert!(above <= crate::topology::MAX_SWITCHES_ABOVE);
                        let _ = (
                            topology.pci_id(gpu),
                            topology.numa_node(gpu),
                            topology.uuid(gpu),
                        );
                    });
                    let _ = topology.memory_bytes();
                }
                Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
            }
        });
}

#[test]
fn faults() {
    bolero::check!(name = "faults")
        .with_iterations(10_000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let text = input.text("cuMemcpyAsync@1#2:3+=CUDA_ERROR_UNKNOWN,cuInit=SIGSTOP");
            let _ = crate::topology::fnv1a(&input.word().to_le_bytes());
            if let Err(error) = Faults::parse(&text) {
                assert!(error.starts_with("SIMCUDA_FAULT: "), "{error}");
            }
        });
}
