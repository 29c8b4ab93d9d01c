//! An exported allocation as ranks describe it to each other: the sender's in its message, the receiver's in
//! its offer.

use crate::cuda::{Allocation, Buffer, Export, IpcHandle};
use crate::node::{Message, Peer, Target};
use crate::policy::pipeline::OnGpu;
use crate::stats::{self, Reason};
use crate::transfer::fetch::flag;
use crate::transfer::gpu::Gpu;
use crate::transfer::Env;

impl From<&Message> for Export {
    fn from(message: &Message) -> Export {
        Export {
            handle: IpcHandle(message.ipc_handle),
            base: message.base,
            size: message.allocation_bytes,
            offset: message.offset,
            buffer_id: message.buffer_id,
            uuid: message.device,
        }
    }
}

impl From<&Target> for Export {
    fn from(target: &Target) -> Export {
        Export {
            handle: IpcHandle(target.ipc_handle),
            base: target.base,
            size: target.allocation_bytes,
            offset: target.offset,
            buffer_id: target.buffer_id,
            uuid: target.device,
        }
    }
}

impl From<&Export> for Target {
    fn from(export: &Export) -> Target {
        Target {
            ipc_handle: export.handle.0,
            device: export.uuid,
            base: export.base,
            allocation_bytes: export.size,
            offset: export.offset,
            buffer_id: export.buffer_id,
        }
    }
}

/// Describes a buffer for its receiver: exports it, or sends files of its chunks, where that can be done.
pub fn describe(env: &Env, gpu: &mut Gpu, peer: &Peer, buffer: &Buffer, message: &mut Message) {
    let bytes = message.length;
    message.base = buffer.address - buffer.offset;
    message.offset = buffer.offset;
    message.allocation_bytes = buffer.size;
    message.buffer_id = buffer.buffer_id;
    message.device = buffer.uuid;
    let exported = gpu.export(env, buffer);
    let shared = |gpu: &mut Gpu, error| gpu.share(env, peer, buffer, bytes).ok_or(error);
    match exported.or_else(|error| shared(gpu, error)) {
        Ok(export) => {
            message.flags |= flag::EXPORTED;
            message.base = export.base;
            message.offset = export.offset;
            message.allocation_bytes = export.size;
            message.buffer_id = export.buffer_id;
            message.ipc_handle = export.handle.0;
        }
        Err(error) => {
            stats::fallback(Reason::NotExportable, bytes);
            log::debug!(
                "device buffer {:#x} goes through staging memory: {error}",
                buffer.address
            );
            let is_own = peer.world_rank() == env.world_rank;
            let is_long = bytes >= OnGpu::between(false).bytes_min;
            // If the driver refuses to export memory of a kind that can be exported, it refuses staging,
            // too.
            let is_refused = buffer.allocation == Allocation::Plain;
            if env.config.gpu_pipeline && is_long && !is_own && !is_refused {
                if let Ok(context) = buffer.context_key() {
                    gpu.relays.stage_own(env, context);
                }
            }
        }
    }
}
