//! An exported allocation as ranks describe it to each other: the sender's in its message, the receiver's in
//! its offer.

use crate::cuda::{Export, IpcHandle};
use crate::node::{Message, Target};

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
