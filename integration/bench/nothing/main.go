// SPDX-License-Identifier: Apache-2.0

// Command nothing is a CNI plugin whose ADD only prints the prevResult. A real plugin's time minus that of this one is its own work.
package main

import (
	"encoding/json"
	"io"
	"os"
)

func main() {
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err == nil {
		err = json.Unmarshal(stdin, &conf)
	}
	if err == nil && os.Getenv("CNI_COMMAND") == "ADD" {
		_, err = os.Stdout.Write(conf.PrevResult)
	}
	if err != nil {
		os.Exit(1)
	}
}
